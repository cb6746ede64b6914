"""What has to be the same: on all ranks when a run starts, and in a saved state and the run that resumes from it."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch

from adloco_dist.averaging.averager import Averager, Wire
from adloco_dist.averaging.codecs import Signs
from adloco_dist.averaging.in_place import InPlace
from adloco_dist.averaging.outer_sgd import OuterSGD
from adloco_dist.averaging.outer_step import OuterStep
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.schema import NOTHING, Kind
from adloco_dist.vectors import shape_in_words

log = logging.getLogger("adloco_dist.diloco")

FIELDS = ("changing_buffers", "copies", "checksums", "settings", "round", "updates", "steps")
"""What a state has beside buffers and what entries name."""


def refuse(updates_per_round: int, timeout_seconds: float, outer: OuterSGD, wire: Wire) -> None:
    """Refuse settings that cannot be used, or not together, by a ValueError of one line."""
    if not isinstance(updates_per_round, int) or updates_per_round < 1:
        raise ValueError(f"updates_per_round={updates_per_round}: must be a whole number >= 1")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds={timeout_seconds}: must be > 0")
    keeps_much = isinstance(wire.averager, Sparse) or wire.averager == Quantized(Signs(), keeps_residual=True)
    if keeps_much and outer.momentum:
        kept = "Sparse keeps" if isinstance(wire.averager, Sparse) else "Signs keep"
        rule = f"would count twice what {kept} for later; use OuterSGD(lr=1.0, momentum=0.0)"
        raise ValueError(f"outer: momentum={outer.momentum} {rule}")


def settings_in_words(updates_per_round: int, outer: OuterSGD, averager: Averager, wire: Wire) -> dict[str, str]:
    """What ranks compare at the start, and a saved state with the run that resumes from it; by name."""
    return {
        "updates_per_round": str(updates_per_round),
        **{f"outer {name}": str(value) for name, value in asdict(outer).items()},
        "averager": str(averager) if is_dataclass(averager) else type(averager).__qualname__,
        **{f"wire {name}": str(getattr(wire, name)) for name in ("fragments", "delay_updates")},
    }


def state_of(step: OuterStep[InPlace], worker: str) -> dict[str, Any]:
    """What is to be saved of a rank's outer step: its very tensors; what ranks have for themselves is named after the
    rank's worker, so that no two of them have the same name."""
    (replica,) = step.workers
    return {
        **_tensors(step, worker),
        **{name: None if value == NOTHING else value for name, value in _numbers(replica).items()},
        "checksums": {worker: replica.parameters.checksums()},
        "changing_buffers": replica.buffers.changing,
        "copies": replica.copies.names,
        "steps": step.steps,
    }


def load_state(
    state: Mapping[str, Any], step: OuterStep[InPlace], worker: str, settings: Mapping[str, str], is_plain: bool
) -> None:
    """Give a rank's outer step the state that was saved.

    A ValueError of one line says that it is of another model, rank or setting; nothing has been loaded then. In a plain
    run (`is_plain`) all ranks have the same weights at the end of a round.
    """
    (replica,), tensors = step.workers, _tensors(step, worker)
    saved_tensors = [name for name, value in state.items() if isinstance(value, Mapping) and name not in FIELDS]
    for part in dict.fromkeys((*tensors, *saved_tensors)):
        saved, present = state.get(part, {}), tensors.get(part, {})
        for name in {**present, **saved}:
            was, is_here = (shape_in_words(where[name]) if name in where else "missing" for where in (saved, present))
            if was != is_here:
                rule = "load the state of the same model and outer optimizer, and on each rank its own"
                raise ValueError(f"state_dict: its {part} of {name} is {was}, but {is_here} here; {rule}")
    if lacking := [field for field in (*FIELDS, *_numbers(replica)) if field not in state]:
        raise ValueError(f"state_dict: it has no {lacking[0]}; load what DiLoCo.state_dict returned")
    # In the middle of a round, and with fragments or a delay, a worker has weights of its own. Otherwise another rank's
    # state is as good, and other settings may be wanted.
    has_own = bool(state["updates"]) or not is_plain
    _check_weights(state["checksums"].get(worker), replica.parameters.checksums(), worker, has_own)
    for name, value in settings.items():
        if (saved := state["settings"].get(name)) != value:
            line = f"state_dict: {name} was {saved} when it was saved, and is {value} here"
            if has_own:
                raise ValueError(f"{line}; in the middle of a round, and with fragments or a delay, it has to stay")
            log.warning(line)
    for part, present in tensors.items():
        for name, tensor in present.items():
            tensor.copy_(state[part][name])
    for name in _numbers(replica):
        setattr(replica, name, NOTHING if state[name] is None else int(state[name]))
    replica.buffers.changing, replica.copies.names = state["changing_buffers"], state["copies"]
    step.steps = int(state["steps"])


def _tensors(step: OuterStep[InPlace], worker: str) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a state, by part and name: vectors by the model's tensors, what a rank has for itself by rank."""
    shards, (replica,) = step.division.shards, step.workers
    place = f", {shards.place}" if shards.ranks else ""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    kept = [(entry, getattr(owner, entry.name)) for owner in (step, replica) for entry in owner.entries]
    for entry, value in kept:
        if entry.kind is Kind.vector:
            views = replica.parameters.layout.views(value).items()
            tensors[entry.name] = {name + place: view for name, view in views}
        elif entry.kind is not Kind.equal:
            tensors[entry.name] = {worker + place: value}
    return tensors | {"buffers": {name + place: value for name, value in replica.buffers.values.items()}}


def _numbers(replica: InPlace) -> dict[str, int]:
    """The numbers that are kept of a worker, by name."""
    return {entry.name: getattr(replica, entry.name) for entry in replica.entries if entry.kind is Kind.equal}


def _check_weights(saved: torch.Tensor | None, present: torch.Tensor, worker: str, has_own: bool) -> None:
    """Make sure that a state was saved with the weights that are there, by checksums of the parameters and of the
    optimizers' states, (2,); without those `saved` it is another worker's, which will do if no worker has its own."""
    if saved is None:
        if has_own:
            rule = "in the middle of a round, and with fragments or a delay, each rank has its own"
            raise ValueError(f"state_dict: it is not that of {worker}; {rule}; save and load it on each")
        return
    if saved[0] != present[0]:
        what = "it is from the middle of a round" if has_own else "it was saved with other weights than the model has"
        rule = "load the model's state after DiLoCo is constructed, which gives all ranks the lowest rank's weights"
        names = "torch.distributed.checkpoint keeps one of what has the same name on several ranks"
        raise ValueError(f"state_dict: {what}; {rule}, and on each rank its own ({names})")
    if saved[1] != present[1]:
        rule = "load it before DiLoCo's, on each rank its own, so that the run goes on as if it had not stopped"
        log.warning("state_dict: the optimizer's state is not the one that this rank has saved; %s", rule)
