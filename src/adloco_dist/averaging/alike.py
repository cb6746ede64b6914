"""The start of a run: settings that go together, ranks that agree on model and settings, and get the same weights."""

import logging
from collections.abc import Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist

from adloco_dist.averaging.averager import Averager, described
from adloco_dist.averaging.buffers import AveragedBuffers
from adloco_dist.averaging.checks import configurations_differ
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.outer import OuterSGD
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.schedule import Streaming
from adloco_dist.averaging.sparse import Sparse

log = logging.getLogger("adloco_dist.diloco")


def refuse(outer: OuterSGD, averager: Averager, is_sharded: bool) -> None:
    """Refuse an outer optimizer that does not go with what travels.

    Raises:
        ValueError: it does not; one line.
    """
    if averager.keeps_residual and outer.radial:
        rule = "restores lengths, which error feedback would count twice; choose one of them"
        raise ValueError(f"outer: radial={outer.radial} {rule}")
    if isinstance(averager, Sparse) and outer.momentum:
        rule = "would count twice what Sparse keeps for later; use OuterSGD(lr=1.0, momentum=0.0, nesterov=False)"
        raise ValueError(f"outer: momentum={outer.momentum} {rule}")
    if is_sharded and outer.radial:
        raise ValueError(f"outer: radial={outer.radial} needs whole tensors; it does not go with a sharded model")


def settings_in_words(
    updates_per_round: int, outer: OuterSGD, averager: Averager, streaming: Streaming
) -> dict[str, str]:
    """What ranks compare at the start, and a saved state with the run that resumes from it; by name."""
    return {
        "updates_per_round": str(updates_per_round),
        **{f"outer {name}": str(value) for name, value in asdict(outer).items()},
        "averager": described(averager),
        **{f"streaming {name}": str(value) for name, value in asdict(streaming).items()},
    }


def start_alike(
    group: Group, settings: Mapping[str, str], parameters: TrainedParameters, buffers: AveragedBuffers,
    anchor: torch.Tensor,
) -> None:  # fmt: skip
    """Compare the ranks' models and settings, and give all of them the lowest rank's weights and buffers. Collective.

    Args:
        settings: what ranks have to agree on beside the model, by name.
        anchor: this rank's, (num_elements,); the lowest rank's afterwards.

    Raises:
        ValueError: they differ; one line, the same on all ranks.
    """
    if difference := configurations_differ(group, {**settings, **parameters.facts(), **buffers.facts()}):
        raise ValueError(f"{difference}; start all ranks with the same model and settings")
    if dist.get_rank() == group.ranks[0] and (names := parameters.without_optimizer):
        log.warning("%d parameters that require gradients are in no optimizer: %s, ...", len(names), names[0])
    group.broadcast(anchor)
    parameters.put(anchor)
    buffers.broadcast(group, anchor.device)
