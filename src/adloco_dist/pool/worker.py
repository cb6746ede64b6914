"""A model instance: weights and an inner optimizer. It is logical: placed on a rank, it may come to another trainer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adloco_dist.averaging.fragments import Fragment, Run, largest
from adloco_dist.averaging.outer_sgd import add_difference, chunk_elements, rejoin
from adloco_dist.averaging.replica import Replica, replica_entries
from adloco_dist.config import InnerOptimizer, InnerSettings, WireSettings
from adloco_dist.objective.matrices import Matrices, mean_width
from adloco_dist.policy.schedule import rate_of_width
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.muon import Muon
from adloco_dist.schema import Entry, Kind, assign, gather


@dataclass(frozen=True)
class Leaf:
    """A part of the weights that an optimizer sees as one parameter."""

    where: slice
    shape: tuple[int, ...]
    tensors: tuple[int, ...]
    """Indices of the trained parameters in it."""
    optimizer: InnerOptimizer
    weight_decay: float
    matrices: Matrices | None = None
    """As which Muon sees it."""

    def moments(self, inner: InnerSettings) -> dict[str, Kind]:
        """What its optimizer keeps of it, by torch's names: of kind `part` as large as the leaf, or a scalar."""
        if self.optimizer is InnerOptimizer.adamw:
            return {"exp_avg": Kind.part, "exp_avg_sq": Kind.part, "step": Kind.equal}
        return {"momentum_buffer": Kind.part} if self.optimizer is InnerOptimizer.muon or inner.momentum else {}


def peak_lr(inner: InnerSettings, hidden: Mapping[str, Matrices]) -> float:
    """The peak rate of one worker: what is named, or what suits the matrices that Muon updates."""
    return inner.lr or rate_of_width(mean_width(hidden.values()))


def leaves_of(flat_model: FlatModel, inner: InnerSettings) -> list[Leaf]:
    """The leaves of the inner optimizers: with Muon every hidden matrix; then what is decayed, and what is not."""
    layout, is_muon = flat_model.parameter_layout, inner.optimizer is InnerOptimizer.muon
    hidden = flat_model.hidden_matrices if is_muon else {}
    others = InnerOptimizer.adamw if is_muon else inner.optimizer
    leaves = [
        Leaf(
            slice(start, start + shape.numel()),
            tuple(shape),
            (index,),
            InnerOptimizer.muon,
            inner.weight_decay,
            matrices,
        )
        for index, (name, start, shape) in enumerate(zip(layout.names, layout.offsets, layout.shapes, strict=True))
        if (matrices := hidden.get(name))
    ]
    starts, ends = [leaf.where.start for leaf in leaves], [leaf.where.stop for leaf in leaves]
    boundary, end = flat_model.decay_boundary, flat_model.num_elements
    for start, stop in zip([0, *ends, boundary], [*starts, boundary, end], strict=True):
        tensors = tuple(index for index, offset in enumerate(layout.offsets) if start <= offset < stop)
        if tensors or (stop > start and start >= boundary):  # gaps between matrices are nobody's
            decay = inner.weight_decay if start < boundary else 0.0
            leaves.append(Leaf(slice(start, stop), (stop - start,), tensors, others, decay))
    return leaves


def moment_entries(leaves: Sequence[Leaf], inner: InnerSettings) -> list[Entry]:
    """What the inner optimizers keep of the leaves, in the order of their `moments`."""
    return [
        Entry(f"{number}.{name}", kind, leaf.tensors if kind is Kind.part else ())
        for number, leaf in enumerate(leaves)
        for name, kind in leaf.moments(inner).items()
    ]


def own_entries(wire: WireSettings) -> list[Entry]:
    """What a worker keeps beside its optimizers' state: attributes of it."""
    return [
        Entry("weights", Kind.vector, is_progress=True),
        *replica_entries(wire.is_delayed),
        Entry("updates_done", Kind.equal, is_progress=True),
        Entry("num_targets", Kind.summed, is_progress=True),
        Entry("loss_sum", Kind.summed, is_progress=True),
        Entry("has_restarted", Kind.equal, is_progress=True),
    ]


class Worker(Replica):
    """Worker `id` of a trainer; the end of `weights` holds the buffers that its training changes.

    Its optimizers hold leaves that share memory with `weights`: the decayed and the undecayed part, with Muon every
    hidden matrix by itself. Their gradients are those of the flat model on which it has its turn, so a step must follow
    the worker's own backward pass. Moments exist from the start: the memory of an instance never grows.
    """

    def __init__(
        self, worker_id: int, weights: torch.Tensor, flat_model: FlatModel, inner: InnerSettings, wire: WireSettings
    ) -> None:
        """
        Args:
            weights: (num_elements,); the worker keeps this very tensor.
            flat_model: says only where what lies, with whom, and on which device steps are taken.
            wire: in which parts the model is averaged, and when.
        """
        departed = largest(flat_model.fragments(wire.fragments)) if wire.is_delayed else 0
        super().__init__(worker_id, weights.new_zeros(departed))
        self.weights, self._device = weights, flat_model.device
        self.loss_sum = torch.zeros((), dtype=weights.dtype, device=flat_model.device)
        """Sum over the updates of a round of the batches' mean losses, in nats per token; on the device."""
        self.updates_done = 0
        """Updates taken in the present round."""
        self.num_targets = 0
        """Tokens or labels that those updates predicted; padding is not counted."""
        self.has_restarted = False
        """Whether it restarted from the anchor in this round because its weights were not finite."""
        self.step_losses: list[torch.Tensor] = []
        """Mean losses of the updates since the run (re)started, where they are recorded; scalars on the device."""
        self.entries, leaves = own_entries(wire), leaves_of(flat_model, inner)
        self._moment_entries = moment_entries(leaves, inner)
        self._states = [_LeafState(leaf, weights, inner, flat_model.device) for leaf in leaves]
        self._optimizers = [
            _new_optimizer(kind, [state for state in self._states if state.leaf.optimizer is kind], inner, flat_model)
            for kind in dict.fromkeys(leaf.optimizer for leaf in leaves)
        ]

    def attach(self, flat_model: FlatModel) -> None:
        """Point a module at this worker's weights, and the optimizers at the gradients that the module fills."""
        flat_model.point_at(self.weights)
        for state in self._states:
            state.parameter.grad = flat_model.gradient[state.leaf.where].view(state.leaf.shape)

    def step(self) -> None:
        """Let every optimizer take a step with the gradients that are in the flat model."""
        for optimizer in self._optimizers:
            optimizer.step()

    def begin_round(self, reset_moments: bool) -> None:
        """Prepare for the first update of a round."""
        self.updates_done = self.num_targets = 0
        self.has_restarted = False
        self.loss_sum.zero_()
        self.step_losses = []
        if reset_moments:
            self.reset_optimizer()

    def losses(self) -> list[torch.Tensor]:
        return [self.loss_sum]

    def runs(self, fragment: Fragment) -> Iterator[Run]:
        return fragment.runs(chunk_elements(self._device))

    def add_difference(self, anchor: torch.Tensor, total: torch.Tensor, run: Run, is_first: bool) -> None:
        add_difference(anchor, self.weights[run.where], total, is_first, self.weight)

    def restart(self, anchor: torch.Tensor, run: Run) -> None:
        self.weights[run.where].copy_(anchor, non_blocking=True)

    def depart(self, fragment: Fragment) -> None:
        for run in self.runs(fragment):
            self.departed[run.packed].copy_(self.weights[run.where])

    def rejoin(self, anchor: torch.Tensor, fragment: Fragment) -> None:
        for run in self.runs(fragment):
            rejoin(self.weights[run.where], self.departed[run.packed], anchor[run.where])

    def shift(self, anchor: torch.Tensor, awaited: Fragment | None, sign: int) -> None:
        """Leave an anchor, w <- w - x, or come to one, w <- w + x; also of what was sent off of a fragment."""
        self.weights.add_(anchor.to(self.weights.device), alpha=sign)
        for run in self.runs(awaited) if awaited and len(self.departed) else ():
            self.departed[run.packed].add_(anchor[run.where].to(self.departed.device), alpha=sign)

    def recover(self, anchor: torch.Tensor) -> None:
        """Replace weights that are not finite by the anchor, with fresh moments; the round's mean loss is unknown."""
        self.weights.copy_(anchor)
        self.reset_optimizer()
        self.loss_sum.zero_()
        self.has_restarted = True

    def begin_again(self, anchor: torch.Tensor, updates_done: int) -> None:
        """Stand at the anchor with fresh moments. In a round of which it counts as having taken updates, whose loss is
        unknown, it is left out of the next average."""
        self.weights.copy_(anchor)
        self.reset_optimizer()
        self.updates_done = updates_done
        if updates_done:
            self.has_restarted = True
            self.loss_sum.fill_(math.nan)

    def mean_loss(self, num_updates: int) -> float:
        """The mean loss of so many updates of the round; NaN if it restarted in them."""
        return math.nan if self.has_restarted else float(self.loss_sum) / num_updates

    def read_step_losses(self) -> list[float]:
        """The mean loss of each update of the round so far, in one copy from the device; NaN before a restart."""
        known: list[float] = torch.stack(self.step_losses).tolist() if self.step_losses else []
        return [math.nan] * (self.updates_done - len(known)) + known

    def state(self, is_away: bool) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the worker, by name of the entry: the tensors themselves, not copies; of one
        that is away from its anchor also its weights and its progress."""
        entries = [entry for entry in self.entries if is_away or not entry.is_progress]
        return {**self._moments(), **gather(self, entries)}

    def restore(self, state: Mapping[str, torch.Tensor], anchor: torch.Tensor) -> None:
        """Restore a state; without weights in it the worker stands at `anchor`. KeyError: a part is missing."""
        self.weights.copy_(anchor)
        for name, value in self._moments().items():
            value.copy_(state[name])
        assign(self, [entry for entry in self.entries if "weights" in state or not entry.is_progress], state)

    def _moments(self) -> dict[str, torch.Tensor]:
        """What the optimizers keep, by name of the entry."""
        values = (value for state in self._states for value in state.moments.values())
        entries = zip(self._moment_entries, values, strict=True)
        return {entry.name: value.view(-1) if entry.kind is Kind.part else value for entry, value in entries}

    def vectors(self) -> list[torch.Tensor]:
        """The weights and the moments of all leaves, in a fixed order: everything that is as large as the model."""
        moments = [value for state in self._states for value in state.moments.values() if value.ndim]
        return [self.weights, *moments]

    def move(self, places: Sequence[torch.Tensor]) -> None:
        """Copy all `vectors` into `places`, of the same shapes on any device, and use those from now on.

        The copies are made in the order of the device's work, without waiting for it.
        """
        for vector, place in zip(self.vectors(), places, strict=True):
            vector.data = place.copy_(vector, non_blocking=True)
        for state in self._states:
            state.parameter.grad = None  # of the device that it was on
            state.parameter.data = self.weights.data[state.leaf.where].view(state.leaf.shape)

    def reset_optimizer(self) -> None:
        for value in self._moments().values():
            value.zero_()

    def set_learning_rate(self, share: float) -> None:
        """Set the rates of the next update, each to a share of its peak."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak_lr"]


class _LeafState:
    """A leaf of one worker, which shares memory with its weights, with the state that the optimizer keeps of it."""

    def __init__(self, leaf: Leaf, weights: torch.Tensor, inner: InnerSettings, device: torch.device) -> None:
        self.leaf, self.parameter = leaf, weights[leaf.where].view(leaf.shape)
        self.moments = {
            name: torch.zeros_like(self.parameter) if kind is Kind.part else torch.zeros((), device=device)
            for name, kind in leaf.moments(inner).items()
        }


def _new_optimizer(
    kind: InnerOptimizer, states: Sequence[_LeafState], inner: InnerSettings, flat_model: FlatModel
) -> torch.optim.Optimizer:
    """One optimizer for these leaves, with their state."""
    peak = peak_lr(inner, flat_model.hidden_matrices)
    groups: list[dict[str, Any]] = [
        {
            "params": [state.parameter],
            "weight_decay": state.leaf.weight_decay,
            "lr": peak,
            "peak_lr": peak if kind is inner.optimizer else peak * inner.other_lr_factor,
            "matrices": state.leaf.matrices,
        }
        for state in states
    ]
    match kind:
        case InnerOptimizer.adamw:
            betas = (inner.beta1, inner.beta2)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=betas, eps=inner.eps, fused=True)
        case InnerOptimizer.sgd:
            optimizer = torch.optim.SGD(groups, momentum=inner.momentum, fused=True)
        case InnerOptimizer.muon:
            optimizer = Muon(groups, inner.momentum, flat_model.product_dtype, flat_model.shards)
    for state in states:
        optimizer.state[state.parameter] = state.moments
    return optimizer
