"""A model instance: weights and an inner optimizer. It is logical: placed on a rank, it may come to another trainer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.fragments import largest
from adloco_dist.averaging.outliers import NormHistory
from adloco_dist.config import InnerOptimizer, InnerSettings, WireSettings
from adloco_dist.pool.flat_model import FlatModel

NOTHING = -1


class Worker:
    """Worker `id` of a trainer: `weights` also holds the buffers that its training changes.

    Its optimizers hold leaves that share memory with `weights`: the decayed and the undecayed part, with Muon every
    hidden matrix by itself. Their gradients are those of the flat model on which it has its turn, so a step must follow
    the worker's own backward pass. Moments exist from the start: what an instance takes of a device never grows.
    """

    def __init__(
        self, worker_id: int, weights: torch.Tensor, flat_model: FlatModel, inner: InnerSettings,
        wire: WireSettings | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            weights: (num_elements,); the worker keeps this very tensor.
            flat_model: says where weight decay ends, and the device on which steps are taken; nothing else.
            wire: in which parts the model is averaged, and when; None: as a whole, without delay.
        """
        self.id = worker_id
        self.weights = weights
        self.updates_done = 0
        """Updates taken in the present round."""
        self.awaits = NOTHING
        """The fragment whose outer step it has not received yet."""
        self.weight = 1.0
        """What it counts for in averages: its updates in a round, relative to the fastest worker's."""
        wire = wire or WireSettings()
        self.norms = NormHistory(wire.fragments)
        """Of its pseudo-gradients, where they decide whether it is left out of an average."""
        fragments = flat_model.fragments(wire.fragments)
        self.departed = weights.new_zeros(largest(fragments) if wire.is_delayed else 0)
        """Its weights in the fragment that it awaits as they were sent off."""
        self.num_targets = 0
        """Tokens or labels that those updates predicted; padding is not counted."""
        self.loss_sum = torch.zeros((), dtype=weights.dtype, device=flat_model.device)
        """Sum over those updates of the batches' mean losses, in nats per token; a scalar on the device."""
        self.step_losses: list[torch.Tensor] = []
        """Mean losses of the updates since the run (re)started, where they are recorded; scalars on the device."""
        self._parts = [
            _Part(optimizer, leaf, where, shape)
            for optimizer, leaf, where, shape in _new_optimizers(weights, flat_model, inner)
        ]
        self._optimizers = list({id(part.optimizer): part.optimizer for part in self._parts}.values())

    @property
    def is_finite(self) -> bool:
        """Whether its weights and losses are: gradients that are not finite leave weights that are not.

        Only losses since it last restarted count.
        """
        return bool(torch.isfinite(self.weights.sum()) and torch.isfinite(self.loss_sum))

    def attach(self, flat_model: FlatModel) -> None:
        """Point a module at this worker's weights, and the optimizers at the gradients which that module fills."""
        flat_model.point_at(self.weights)
        for part in self._parts:
            part.leaf.grad = flat_model.gradient[part.where].view(part.shape)

    def step(self) -> None:
        """Take an update with the gradients that are there."""
        for optimizer in self._optimizers:
            optimizer.step()

    def begin_round(self, reset_moments: bool) -> None:
        """Prepare for the first update of a round."""
        self.updates_done = self.num_targets = 0
        self.loss_sum.zero_()
        self.step_losses = []
        if reset_moments:
            self.reset_optimizer()

    def restart(self, anchor: torch.Tensor) -> None:
        """Take the anchor for weights that are not finite, with fresh moments.

        The round's mean loss stays unknown: its sum becomes the least number that there is, which finite losses leave
        as it is, while one that is not finite is noticed as ever.
        """
        self.weights.copy_(anchor)
        self.reset_optimizer()
        self.loss_sum.fill_(torch.finfo(self.loss_sum.dtype).min)

    def mean_loss(self, num_updates: int) -> float:
        """The mean loss of so many updates of the round; NaN if it restarted in them."""
        total = float(self.loss_sum)
        return math.nan if total == torch.finfo(self.loss_sum.dtype).min else total / num_updates

    def read_step_losses(self) -> list[float]:
        """The mean loss of each update of the round so far, in one copy from the device; NaN before a restart."""
        known: list[float] = torch.stack(self.step_losses).tolist() if self.step_losses else []
        return [math.nan] * (self.updates_done - len(known)) + known

    def state(self, with_weights: bool) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the worker, by name: these very tensors.

        Args:
            with_weights: whether to keep weights and progress as well: of a worker that does not stand at the anchor.
        """
        state = {
            f"{number}.{name}": value.view(-1) if value.ndim else value
            for number, part in enumerate(self._parts)
            for name, value in part.state.items()
        }
        state["norms"] = self.norms.values.view(-1)
        if with_weights:
            state |= {"weights": self.weights, "loss_sum": self.loss_sum}
            state["updates_done"] = torch.tensor(self.updates_done)
            state["awaits"] = torch.tensor(self.awaits)
            if len(self.departed):
                state["departed"] = self.departed
            state["num_targets"] = torch.tensor(self.num_targets)
        return state

    def restore(self, state: Mapping[str, torch.Tensor], anchor: torch.Tensor) -> None:
        """Become what `state` was taken of; without weights in it the worker stands at `anchor`.

        Raises:
            KeyError: a part of the state is missing.
        """
        self.weights.copy_(anchor)
        for name, value in self.state("weights" in state).items():
            value.copy_(state[name])
        self.updates_done = int(state.get("updates_done", 0))
        self.num_targets = int(state.get("num_targets", 0))
        self.awaits = int(state.get("awaits", NOTHING))

    def vectors(self) -> list[torch.Tensor]:
        """The weights and the moments of all parts: all that is as large as the model, in a fixed order."""
        moments = [value for part in self._parts for value in part.state.values() if value.ndim]
        return [self.weights, *moments]

    def move(self, places: Sequence[torch.Tensor]) -> None:
        """Copy all vectors into `places` and live there; in the order of the device's work, without waiting for it.

        Args:
            places: one for each of `vectors`, of the same shape, on any device.
        """
        for vector, place in zip(self.vectors(), places, strict=True):
            vector.data = place.copy_(vector, non_blocking=True)
        for part in self._parts:
            part.leaf.grad = None  # of the device that it was on
            part.leaf.data = self.weights.data[part.where].view(part.shape)

    def reset_optimizer(self) -> None:
        """Start with fresh moments."""
        for part in self._parts:
            for value in part.state.values():
                value.zero_()

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate


@dataclass(frozen=True)
class _Part:
    """A part of the weights that an optimizer sees as one parameter."""

    optimizer: torch.optim.Optimizer
    leaf: torch.Tensor
    where: slice
    shape: tuple[int, ...]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state[self.leaf]


_Leaf = tuple[torch.Tensor, slice, tuple[int, ...]]


def _new_optimizers(
    weights: torch.Tensor, flat_model: FlatModel, inner: InnerSettings
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, slice, tuple[int, ...]]]:  # fmt: skip
    """Construct the optimizers, with their moments; yield each with its leaves."""
    matrices = flat_model.hidden_matrices if inner.optimizer is InnerOptimizer.muon else []
    if matrices:
        leaves: list[_Leaf] = [(weights[where].view(shape), where, shape) for where, shape in matrices]
        muon = torch.optim.Muon(
            [leaf for leaf, _, _ in leaves], inner.lr, inner.weight_decay, inner.momentum,
            adjust_lr_fn="match_rms_adamw",  # so that one rate suits both optimizers (Moonlight, 2502.16982)
        )  # fmt: skip
        yield from _with_moments(muon, leaves, ("momentum_buffer",), flat_model.device)
    boundary, end = flat_model.decay_boundary, len(weights)
    leaves, groups = [], []
    for start, stop, decay in [*_between(matrices, boundary, inner.weight_decay), (boundary, end, 0.0)]:
        if stop > start:
            where = slice(start, stop)
            leaves.append((weights[where], where, (stop - start,)))
            groups.append({"params": [leaves[-1][0]], "weight_decay": decay})
    if inner.optimizer is InnerOptimizer.sgd:
        sgd = torch.optim.SGD(groups, lr=inner.lr, momentum=inner.momentum, fused=True)
        names = ("momentum_buffer",) if inner.momentum else ()
        yield from _with_moments(sgd, leaves, names, flat_model.device)
    else:
        adamw = torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True)
        yield from _with_moments(adamw, leaves, ("exp_avg", "exp_avg_sq"), flat_model.device, has_step=True)


def _with_moments(
    optimizer: torch.optim.Optimizer, leaves: list[_Leaf], names: Sequence[str], device: torch.device,
    has_step: bool = False,
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, slice, tuple[int, ...]]]:  # fmt: skip
    for leaf, where, shape in leaves:
        if has_step:
            optimizer.state[leaf]["step"] = torch.zeros((), device=device)
        for name in names:
            optimizer.state[leaf][name] = torch.zeros_like(leaf)
        yield optimizer, leaf, where, shape


def _between(
    matrices: Sequence[tuple[slice, tuple[int, ...]]], end: int, decay: float
) -> Iterator[tuple[int, int, float]]:  # fmt: skip
    """What lies between the matrices, up to `end`, with its weight decay."""
    start = 0
    for where, _ in matrices:
        yield start, where.start, decay
        start = where.stop
    yield start, end, decay
