"""A model instance: weights and an inner optimizer. Logical: a rank hosts it, and it may come to another trainer."""

from collections.abc import Mapping, Sequence

import torch

from adloco_dist.config import InnerOptimizer, InnerSettings
from adloco_dist.pool.flat_model import FlatModel


class Worker:
    """Worker `id` of a trainer: `weights` also holds the buffers that its training changes.

    Its optimizer holds two leaves that share memory with `weights`, the decayed and the undecayed part. Their
    gradients are those of the flat model on which it has its turn, so a step must follow the worker's own backward
    pass. Moments exist from the start: what an instance takes of a device never grows.
    """

    def __init__(self, id: int, weights: torch.Tensor, flat_model: FlatModel, inner: InnerSettings) -> None:
        """
        Args:
            weights: (num_elements,); the worker keeps this very tensor.
            flat_model: only tells where weight decay ends, and the device on which steps are taken.
        """
        self.id = id
        self.weights = weights
        self.updates_done = 0
        """Of the present round."""
        self.num_targets = 0
        """Tokens or labels that those predicted; padding is none."""
        self.loss_sum = torch.zeros((), dtype=weights.dtype, device=flat_model.device)
        """Over those, of the batches' mean losses in nats per token."""
        self._parts: list[tuple[torch.Tensor, slice]] = []
        groups = []
        boundary = flat_model.decay_boundary
        for part, decay in ((slice(None, boundary), inner.weight_decay), (slice(boundary, None), 0.0)):
            leaf = weights[part]
            if leaf.numel():
                self._parts.append((leaf, part))
                groups.append({"params": [leaf], "weight_decay": decay})
        leaves = [leaf for leaf, _ in self._parts]
        if inner.optimizer is InnerOptimizer.sgd:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                groups, lr=inner.lr, momentum=inner.momentum, fused=True
            )
            names = ("momentum_buffer",) if inner.momentum else ()
        else:
            self.optimizer = torch.optim.AdamW(
                groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True
            )
            names = ("exp_avg", "exp_avg_sq")
            for leaf in leaves:
                self.optimizer.state[leaf]["step"] = torch.zeros((), device=flat_model.device)
        for leaf in leaves:
            for name in names:
                self.optimizer.state[leaf][name] = torch.zeros_like(leaf)

    def take_turn(self, flat_model: FlatModel) -> None:
        """Point a module at this worker's weights, and the optimizer at the gradients which that module fills."""
        flat_model.point_at(self.weights)
        for leaf, part in self._parts:
            leaf.grad = flat_model.gradient[part]

    def begin_round(self, reset_moments: bool) -> None:
        """Before the first update of a round."""
        self.updates_done = self.num_targets = 0
        self.loss_sum.zero_()
        if reset_moments:
            self.reset_optimizer()

    def state(self, with_weights: bool) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the worker, by name: these very tensors.

        Args:
            with_weights: in the middle of a round, when they differ from the anchor: weights and progress as well.
        """
        state = {
            f"{part}.{name}": value
            for part, (leaf, _) in enumerate(self._parts)
            for name, value in self.optimizer.state[leaf].items()
        }
        if with_weights:
            state |= {"weights": self.weights, "loss_sum": self.loss_sum}
            state["updates_done"] = torch.tensor(self.updates_done)
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

    def vectors(self) -> list[torch.Tensor]:
        """The weights and the moments of both parts: all that is as large as the model, in a fixed order."""
        moments = [value for leaf, _ in self._parts for value in self.optimizer.state[leaf].values() if value.ndim]
        return [self.weights, *moments]

    def move(self, places: Sequence[torch.Tensor]) -> None:
        """Copy all vectors into `places` and live there; in the order of the device's work, without waiting for it.

        Args:
            places: one for each of `vectors`, of the same shape, on any device.
        """
        for vector, place in zip(self.vectors(), places, strict=True):
            vector.data = place.copy_(vector, non_blocking=True)
        for leaf, part in self._parts:
            leaf.grad = None  # of the device that it was on
            leaf.data = self.weights.data[part]

    def reset_optimizer(self) -> None:
        """Start with fresh moments."""
        for leaf, _ in self._parts:
            for value in self.optimizer.state[leaf].values():
                value.zero_()

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
