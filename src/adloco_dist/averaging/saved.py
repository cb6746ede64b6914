"""Whether a saved state is the one that a rank may resume from."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adloco_dist.averaging.checks import compare_tensors

log = logging.getLogger("adloco_dist.diloco")

FIELDS = ("changing_buffers", "copies", "checksums", "settings", "round", "updates", "steps", "awaits")
"""What a state has beside tensors."""


@dataclass(frozen=True)
class Present:
    """What a state has to fit to."""

    worker: str
    """Names this rank's worker among all."""
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """By part and name."""
    checksums: torch.Tensor
    """Of the parameters, and of the optimizers' states; (2,)."""
    settings: Mapping[str, str]
    is_plain: bool
    """Whether all ranks have the same weights at the end of a round."""


def check_state(state: Mapping[str, Any], present: Present) -> None:
    """Make sure that a state is of this model, rank and setting, and was saved with the weights that are there.

    In the middle of a round, and with streaming, a worker has weights of its own. Otherwise another rank's state is as
    good, and other settings may be wanted: they are logged.

    Raises:
        ValueError: it is not; one line.
    """
    for part, tensors in present.tensors.items():
        compare_tensors(part, state.get(part, {}), tensors)
    if lacking := [field for field in FIELDS if field not in state]:
        raise ValueError(f"state_dict: it has no {lacking[0]}; load what DiLoCo.state_dict returned")
    has_own = bool(state["updates"]) or not present.is_plain
    _check_weights(state["checksums"].get(present.worker), present, has_own)
    for name, value in present.settings.items():
        if (saved := state["settings"].get(name)) != value:
            line = f"state_dict: {name} was {saved} when it was saved, and is {value} here"
            if has_own:
                raise ValueError(f"{line}; in the middle of a round, and with streaming, it has to stay")
            log.warning(line)


def _check_weights(saved: torch.Tensor | None, present: Present, has_own: bool) -> None:
    """
    Args:
        saved: the rank's checksums at that time; None where the state has none of it.
    """
    if saved is None and has_own:
        rule = "in the middle of a round, and with streaming, each rank has its own; save and load it on each"
        raise ValueError(f"state_dict: it is not that of {present.worker}; {rule}")
    if saved is None:
        return
    if saved[0] != present.checksums[0]:
        what = "it is from the middle of a round" if has_own else "it was saved with other weights than the model has"
        rule = "load the model's state after DiLoCo is constructed, which gives all ranks the lowest rank's weights"
        names = "torch.distributed.checkpoint keeps one of what has the same name on several ranks"
        raise ValueError(f"state_dict: {what}; {rule}, and on each rank its own ({names})")
    if saved[1] != present.checksums[1]:
        rule = "load it before DiLoCo's, on each rank its own, so that the run goes on as if it had not stopped"
        log.warning("state_dict: the optimizer's state is not the one that this rank has saved; %s", rule)
