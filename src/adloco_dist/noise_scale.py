"""The gradient noise scale of any training loop, with error bars (McCandlish et al., 1812.06162)."""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from adloco_dist.noise.estimation import NoiseEstimate, RunningEstimate
from adloco_dist.noise.gradients import GradientProbe, LocalGradients, ShardedGradients
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.vectors import is_sharded

__all__ = ["NoiseEstimate", "NoiseScale"]

MAX_CHUNKS = 64
"""Chunks of all ranks together, as long as there are no more ranks than that; further ones are united."""

_logger = logging.getLogger(__name__)


class NoiseScale:
    """Measures the gradient noise of a model while it trains, once in `every_updates` updates::

        noise = NoiseScale(model)                              # after DistributedDataParallel or fully_shard
        for batch in loader:
            for micro_batch in batch.split(8):
                loss(model, micro_batch).backward()
                noise.observe(num_sequences=len(micro_batch))  # after each backward pass
            if estimate := noise.update():                     # before the optimizer's step; None if not measured
                print(estimate, estimate.batch_of_norm_test(eta=0.8))
            optimizer.step()
            optimizer.zero_grad()

    It compares the mean gradients of chunks of the batch: the more they differ, the noisier is a sequence's gradient.
    A chunk holds the sequences of one backward pass. Where parameters are plain tensors, alone or under
    DistributedDataParallel with or without no_sync, these are the rank's own: hooks see each gradient before it is
    accumulated and averaged. Where fully_shard shards them, they are all ranks': the shards of the averaged gradient
    are read after that pass. It takes two chunks to measure an update: from two ranks or two backward passes, under
    fully_shard from two that communicate.

    Gradients are not copied but sketched (4093 numbers per chunk), with d / 8 bytes of random signs for a rank's d
    elements. The ranks exchange the sketches in one all-reduce. Updates that are not measured have no hooks.

    Scale: the update's gradient, averaged over the group, is taken to be the mean of its sequences' gradients, so all
    sequences must have the same weight in it. (The mean loss of a micro-batch, divided by the number of micro-batches,
    gives them that if the micro-batches are of one size.) A factor c of the loss multiplies trace and squared norm by
    c^2, and leaves the noise scale and the batches as they are; GradScaler's is divided out by
    `update(loss_scale=...)`. All gradients that reach the parameters between two calls of `observe` belong to one
    chunk, and fully_shard's are taken to begin the update at zero.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None = None, every_updates: int = 20, span: float = 0.15
    ) -> None:
        """
        Args:
            model: on one device, as it is trained: by itself, in DistributedDataParallel, or after fully_shard.
            group: the ranks that average their gradients; None: all, or this one alone where torch.distributed is not
                initialised.
            every_updates: one update in so many is measured, beginning with the first.
            span: share of the measurements so far that averages span, at least three, in [0, 1]; 0: the last one alone.

        Raises:
            ValueError: one of the arguments is unsuitable, or the model's parameters are.
        """
        if every_updates < 1:
            raise ValueError(f"every_updates={every_updates}: must be >= 1; 1 measures every update")
        if not 0 <= span <= 1:
            raise ValueError(f"span={span}: must be in [0, 1]; 0 keeps the last measurement only")
        self._rank, self._num_ranks = 0, 1
        if dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        if self._rank < 0:
            raise ValueError(f"group={group}: this rank is not in it; pass the group that averages its gradients")
        self._group, self._every_updates = group, every_updates
        self._probe = _new_probe(model, self._rank)
        self._running = RunningEstimate(span)
        self._updates = 0
        self._sketches: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._logged: set[str] = set()
        self._begin_update()

    def observe(self, num_sequences: int) -> None:
        """Note that a backward pass over `num_sequences` sequences is done; call it before the next one begins.

        With fully_shard's `set_requires_gradient_sync(False)`, call it after the pass that communicates, with the
        sequences of all passes since the last that did.

        Raises:
            ValueError: no gradient has reached the model's parameters since the last call.
        """
        if num_sequences < 1:
            raise ValueError(f"num_sequences={num_sequences}: must be >= 1; it counts the backward pass's sequences")
        if not self._is_measured:
            return
        sketch = self._probe.take()
        if sketch is None:
            rule = "no gradient reached the model's parameters since the last call; call it once after each backward()"
            raise ValueError(f"observe(num_sequences={num_sequences}): {rule}, on a NoiseScale of the wrapped model")
        self._sketches.append(sketch)
        self._sizes.append(num_sequences)

    def update(self, loss_scale: float = 1.0) -> NoiseEstimate | None:
        """End an update, before its gradients are zeroed. Collective over the group where the update is measured.

        Args:
            loss_scale: factor by which the losses were multiplied, `scaler.get_scale()` of a GradScaler.

        Returns:
            The estimate, the same on all ranks. None if this update is not measured, or cannot be (fewer than two
            chunks, gradients that are not finite), which is logged once.

        Raises:
            ValueError: a backward pass was not observed.
        """
        if not 0 < loss_scale < math.inf:
            raise ValueError(f"loss_scale={loss_scale}: must be > 0; it is the factor of the losses")
        if not self._is_measured:
            return self._end_update(None)
        if self._probe.take() is not None:
            raise ValueError("update(): a backward pass was not observed; call observe(num_sequences) after each")
        parts, sizes = self._exchange()
        if len(sizes) < 2:
            needed = "two backward passes" if self._probe.is_summed_over_ranks else "two backward passes or two ranks"
            return self._end_update(None, f"it has {len(sizes)} chunk(s) to compare; it takes {needed}")
        # The update's gradient is the sum of the parts, and taken to be sum s_j g_j / S.
        means = parts.double() * (sizes.sum() / (loss_scale * sizes))[:, None]
        estimate = self._running.include((means @ means.T).cpu(), sizes.cpu())
        return self._end_update(estimate, None if estimate else "its gradients are not finite")

    def state_dict(self) -> dict[str, Any]:
        """The running averages and counters as plain values, to be taken between two updates."""
        return {"updates": self._updates, **self._running.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`, between two updates."""
        self._updates = state["updates"]
        self._running.load(state)
        self._begin_update()

    def _begin_update(self) -> None:
        self._sketches.clear()
        self._sizes.clear()
        self._probe.stop()
        self._is_measured = self._updates % self._every_updates == 0
        if self._is_measured:
            self._probe.start(self._updates)

    def _end_update(self, estimate: NoiseEstimate | None, obstacle: str | None = None) -> NoiseEstimate | None:
        if obstacle and obstacle not in self._logged:
            self._logged.add(obstacle)
            _logger.warning("noise scale: update %d is not measured: %s", self._updates, obstacle)
        self._updates += 1
        self._begin_update()
        return estimate

    def _exchange(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum or gather the ranks' chunks, by one all-reduce of rows that each rank fills in part: (J, BUCKETS)
        sketches of what each chunk adds to the update's gradient, and (J,) sequences."""
        # fully_shard has averaged over the ranks, whose rows are summed; local gradients are yet to be averaged.
        place, num_places = (0, 1) if self._probe.is_summed_over_ranks else (self._rank, self._num_ranks)
        rows_per_rank = max(1, MAX_CHUNKS // num_places)
        options: dict[str, Any] = {"dtype": self._probe.dtype, "device": self._probe.device}
        rows = torch.zeros(num_places * rows_per_rank, BUCKETS + 1, **options)
        if self._sizes:
            chunks = torch.cat([torch.stack(self._sketches), torch.tensor(self._sizes, **options)[:, None]], dim=1)
            united = chunks.tensor_split(min(rows_per_rank, len(chunks)))  # neighbours, where there are too many
            for number, neighbours in enumerate(united, place * rows_per_rank):
                rows[number] = neighbours.sum(0)
        if self._num_ranks > 1:
            self._work = dist.all_reduce(rows, group=self._group, async_op=True)  # kept: see Group
            assert self._work is not None
            self._work.wait()
        filled = rows[rows[:, -1] > 0]
        return filled[:, :-1] / num_places, filled[:, -1].double()


def _new_probe(model: nn.Module, rank: int) -> GradientProbe:
    """The probe that suits the model's parameters, on the rank of this number among those that share the model.

    A ValueError says that nothing can be measured, or that parameters are distributed in a way that is not supported.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kind = type(model).__name__
    if not trained:
        raise ValueError(f"model={kind}: none of its parameters requires a gradient; unfreeze some")
    devices = {str(parameter.device) for parameter in trained.values()}
    if len(devices) > 1:
        raise ValueError(f"model={kind}: its parameters are on {', '.join(sorted(devices))}; keep them on one device")
    sharded = [name for name, parameter in trained.items() if is_sharded(parameter)]
    if not sharded:
        return LocalGradients(list(trained.values()))
    if len(sharded) < len(trained):
        local = next(name for name in trained if name not in sharded)
        rule = f"{sharded[0]} is sharded and {local} is not; shard all parameters with fully_shard"
        raise ValueError(f"model={kind}: {rule}")
    return ShardedGradients(model, trained, rank)
