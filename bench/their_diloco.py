"""torchft's DiLoCo between two processes, as its documentation has it: one replica each, a lighthouse on rank 0."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)

TIMEOUT = timedelta(seconds=120)


def enter(
    cleanup: ExitStack, fragments: Sequence[nn.Module], inner: torch.optim.Optimizer,
    outer: Sequence[torch.optim.Optimizer], own: str = "127.0.0.1", master: str = "127.0.0.1", **options: Any,
) -> TCPStore:  # fmt: skip
    """Put torchft's DiLoCo around a model. Collective over the default process group, of two ranks.

    Args:
        fragments: modules that have every parameter once.
        outer: an optimizer for each.
        own: this host's address.
        master: rank 0's.
        options: of torchft's DiLoCo.

    Returns:
        The replica's store, which has to live as long.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.WARNING)
    rank, address = dist.get_rank(), [""]
    if rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=1000)
        cleanup.callback(lighthouse.shutdown)
        address = [f"http://{master}:{lighthouse.address().rsplit(':', 1)[1]}"]
    dist.broadcast_object_list(address)
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=2,
        use_async_quorum=False, init_sync=False, rank=0, world_size=1, store_addr=own, store_port=store.port,
        lighthouse_addr=address[0], replica_id=f"replica{rank}", hostname=own, timeout=TIMEOUT, quorum_timeout=TIMEOUT,
    )  # fmt: skip
    cleanup.callback(manager.shutdown)
    cleanup.enter_context(DiLoCo(manager, list(fragments), inner, list(outer), **options))
    return store


def dealt(module: nn.Module, num_fragments: int) -> list[nn.Module]:
    """Modules that have every parameter once, in fragments of about as many elements."""
    leaves = [inner for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None]
    sizes = {inner: sum(p.numel() for p in inner.parameters(recurse=False)) for inner in leaves}
    parts: list[list[nn.Module]] = [[] for _ in range(num_fragments)]
    seen: set[nn.Parameter] = set()
    for inner in sorted(leaves, key=lambda inner: -sizes[inner]):
        if not seen & set(inner.parameters(recurse=False)):  # tied ones once
            min(parts, key=lambda part: sum(sizes[one] for one in part)).append(inner)
        seen |= set(inner.parameters(recurse=False))
    return [nn.ModuleList(part) for part in parts]
