"""The start of a run: settings that go together, ranks that agree on model and settings, and get the same weights."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

import torch
import torch.distributed as dist

from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.buffers import AveragedBuffers
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.outer_sgd import OuterSGD
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.schedule import Streaming
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.text import first_difference

log = logging.getLogger("adloco_dist.diloco")


def refuse(updates_per_round: int, timeout_seconds: float, outer: OuterSGD, averager: Averager | None) -> None:
    """Refuse settings that cannot be used, or not together, by a ValueError of one line."""
    if not isinstance(updates_per_round, int) or updates_per_round < 1:
        raise ValueError(f"updates_per_round={updates_per_round}: must be a whole number >= 1")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds={timeout_seconds}: must be > 0")
    if isinstance(averager, Sparse) and outer.momentum:
        rule = "would count twice what Sparse keeps for later; use OuterSGD(lr=1.0, momentum=0.0)"
        raise ValueError(f"outer: momentum={outer.momentum} {rule}")


def settings_in_words(
    updates_per_round: int, outer: OuterSGD, averager: Averager, streaming: Streaming
) -> dict[str, str]:
    """What ranks compare at the start, and a saved state with the run that resumes from it; by name."""
    return {
        "updates_per_round": str(updates_per_round),
        **{f"outer {name}": str(value) for name, value in asdict(outer).items()},
        "averager": str(averager) if is_dataclass(averager) else type(averager).__qualname__,
        **{f"streaming {name}": str(value) for name, value in asdict(streaming).items()},
    }


def start_alike(
    group: Group,
    settings: Mapping[str, str],
    parameters: TrainedParameters,
    buffers: AveragedBuffers,
    anchor: torch.Tensor,
) -> None:
    """Compare the ranks' models and settings, and give all of them the lowest rank's weights, buffers and anchor.

    Collective.

    Raises:
        ValueError: they differ; one line, the same on all ranks.
    """
    text = json.dumps({**settings, **parameters.facts(), **buffers.facts()}, sort_keys=True)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
    if len({tuple(row) for row in group.exchange([digest])}) > 1:  # else what it is of need not travel
        difference = first_difference([json.loads(one) for one in group.exchange_text(text)], group.ranks)
        raise ValueError(f"{difference}; start all ranks with the same model and settings")
    if dist.get_rank() == group.ranks[0] and (names := parameters.without_optimizer):
        log.warning("%d parameters that require gradients are in no optimizer: %s, ...", len(names), names[0])
    group.broadcast(anchor)
    parameters.put(anchor)
    buffers.broadcast(group, anchor.device)
