"""A model instance: weights and an inner optimizer. Logical: a rank hosts it, and it may move."""

import torch

from adloco_dist.config import InnerOptimizer, InnerSettings
from adloco_dist.pool.flat_model import FlatModel


class Worker:
    """Worker `id` of a trainer.

    Its optimizer holds two leaves that share memory with `weights`, the decayed and the undecayed part; their
    gradients are the rank's shared gradient, so an optimizer step must follow the worker's own backward pass.
    """

    def __init__(self, id: int, anchor: torch.Tensor, flat_model: FlatModel, inner: InnerSettings) -> None:
        self.id = id
        self.weights = anchor.to(flat_model.device, copy=True)
        self._flat_model = flat_model
        self._inner = inner
        self.optimizer = self._fresh_optimizer()

    def reset_optimizer(self) -> None:
        """Start with fresh moments."""
        self.optimizer = self._fresh_optimizer()

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        inner, boundary = self._inner, self._flat_model.decay_boundary
        groups = []
        for part, decay in ((slice(None, boundary), inner.weight_decay), (slice(boundary, None), 0.0)):
            leaf = self.weights[part]
            if leaf.numel():
                leaf.grad = self._flat_model.gradient[part]
                groups.append({"params": [leaf], "weight_decay": decay})
        if inner.optimizer is InnerOptimizer.sgd:
            return torch.optim.SGD(groups, lr=inner.lr, momentum=inner.momentum, fused=True)
        return torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True)
