"""One of the two ranks of bench/wire.py's part `peers`: rounds of our DiLoCo, torchft's and DistributedDataParallel.

Rank 0 prints the seconds of each side's rounds as JSON. A block of a side is three rounds of 25 updates, of which the
first is not counted: what it leaves under way is hidden in the next. DistributedDataParallel averages at every update;
two of them stand for 25.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)
from torch.nn.parallel import DistributedDataParallel

from adloco_dist import DiLoCo, OuterSGD, Streaming
from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.objective.language import LanguageObjective

UPDATES, ROUNDS, DDP_UPDATES = 25, 3, 2
FRAGMENTS, DELAY = 5, 4
"""Of torchft's streaming DiLoCo, which wants updates that are a multiple of the fragments."""
PLAIN = Streaming()
TakeUpdates = Callable[[int], None]


def new_module() -> nn.Module:
    settings = compose(["model=small", "data.sequence_length=128"])
    return LanguageObjective.fitted(settings, Vocabulary(4096)).build(torch.device("cpu"), in_bf16=False)


def updates_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> TakeUpdates:
    tokens = torch.randint(4096, (4, 128))

    def take(count: int) -> None:
        for _ in range(count):
            module(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return take


def alone(cleanup: ExitStack) -> TakeUpdates:
    module = new_module()
    return updates_of(module, torch.optim.AdamW(module.parameters(), fused=True))


def ours(cleanup: ExitStack, averager: Averager | None = None, streaming: Streaming = PLAIN) -> TakeUpdates:
    module = new_module()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    cleanup.enter_context(DiLoCo(module, optimizer, UPDATES, OuterSGD(), averager=averager, streaming=streaming))
    return updates_of(module, optimizer)


def ours_slow_link(cleanup: ExitStack) -> TakeUpdates:
    return ours(cleanup, Quantized(WholeNumbers(4)), Streaming(fragments=4, delay_updates=5))


def ddp(cleanup: ExitStack) -> TakeUpdates:
    module = DistributedDataParallel(new_module())
    return updates_of(module, torch.optim.AdamW(module.parameters(), fused=True))


def torchft(cleanup: ExitStack, is_streaming: bool = False) -> TakeUpdates:
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo as TheirDiLoCo

    logging.disable(logging.WARNING)
    master, own, rank = sys.argv[3], sys.argv[2], dist.get_rank()
    address: list[str | None] = [None]
    if rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=1000)
        cleanup.callback(lighthouse.shutdown)
        address = [f"http://{master}:{lighthouse.address().rsplit(':', 1)[1]}"]
    dist.broadcast_object_list(address)
    module = new_module()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    fragments = their_fragments(module) if is_streaming else [module]
    outer: list[torch.optim.Optimizer] = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments
    ]
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=120)), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=2, use_async_quorum=False, init_sync=False, rank=0, world_size=1, store_addr=own,
        store_port=store.port, lighthouse_addr=address[0], replica_id=f"replica{rank}", hostname=own,
        timeout=timedelta(seconds=120), quorum_timeout=timedelta(seconds=120),
    )  # fmt: skip
    cleanup.callback(manager.shutdown)
    theirs = TheirDiLoCo(
        manager, fragments, optimizer, outer, sync_every=UPDATES, use_bucketization=True,
        fragment_sync_delay=DELAY if is_streaming else 0,
    )  # fmt: skip
    cleanup.enter_context(theirs)
    take = updates_of(module, optimizer)

    def take_with_store(count: int) -> None:
        assert store.port  # it lives as long as the side
        take(count)

    return take_with_store


def torchft_streaming(cleanup: ExitStack) -> TakeUpdates:
    return torchft(cleanup, is_streaming=True)


def their_fragments(module: nn.Module) -> list[nn.Module]:
    """Modules that have every parameter once, in fragments of about as many elements."""
    leaves = [inner for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None]
    sizes = {inner: sum(p.numel() for p in inner.parameters(recurse=False)) for inner in leaves}
    parts: list[list[nn.Module]] = [[] for _ in range(FRAGMENTS)]
    seen: set[nn.Parameter] = set()
    for inner in sorted(leaves, key=lambda inner: -sizes[inner]):
        if not seen & set(inner.parameters(recurse=False)):  # tied ones once
            min(parts, key=lambda part: sum(sizes[one] for one in part)).append(inner)
        seen |= set(inner.parameters(recurse=False))
    return [nn.ModuleList(part) for part in parts]


SIDES = {
    "alone": alone, "ours_fp32": ours, "ours_slow_link": ours_slow_link, "torchft": torchft,
    "torchft_streaming": torchft_streaming, "ddp": ddp,
}  # fmt: skip


def block(name: str) -> list[float]:
    """The seconds of a side's rounds but the first; of a copy of its own, so that nothing is under way before."""
    with ExitStack() as cleanup:
        take, seconds = SIDES[name](cleanup), []
        count = DDP_UPDATES if name == "ddp" else UPDATES
        dist.barrier()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            take(count)
            seconds.append((time.perf_counter() - start) * UPDATES / count)
    return seconds[1:]


def main() -> None:
    rank, _, master, repetitions = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    store = TCPStore(master, 29514, 2, rank == "0", timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(int(repetitions)):
        for name in SIDES:
            found[name] += block(name)
    if rank == "0":
        print("\n" + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # torchft's threads would keep the process


if __name__ == "__main__":
    main()
