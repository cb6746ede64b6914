"""DiLoCo (2311.08105) around anybody's training loop."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from adloco_dist.averaging.anchored import AnchoredWorker, OuterStepReport
from adloco_dist.averaging.averager import Averager, FullPrecision, described
from adloco_dist.averaging.buffers import AveragedBuffers
from adloco_dist.averaging.checks import (
    RESTART,
    checksum,
    compare_tensors,
    configurations_differ,
    contact,
)
from adloco_dist.averaging.group import Group, group_of
from adloco_dist.averaging.outer import OuterSGD
from adloco_dist.averaging.parameters import TrainedParameters, check_data_parallel, unwrapped
from adloco_dist.averaging.schedule import FragmentSchedule, Streaming

log = logging.getLogger(__name__)


class DiLoCo:
    """Trains one worker per rank, and averages what the workers have learned every `updates_per_round` updates::

        with DiLoCo(model, optimizer, updates_per_round=500) as diloco:
            for batch in loader:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    An outer step is taken inside of the `optimizer.step()` that ends a round: the mean of anchor minus weights over the
    workers is the gradient of a step of `outer` on the anchor, from which all workers restart. Everything else in the
    loop is the user's: clipping, accumulation, schedulers, GradScaler, torch.compile, DistributedDataParallel within a
    worker. An update is a call of the optimizer's `step`; of several optimizers, one call of each. All ranks have to
    take the same number of updates.

    Parameters that the optimizers hold and train are averaged, in the memory that they have. Frozen parameters must be
    equal on all ranks. Persistent buffers that training changes in the first round take the mean of the workers'
    values, all others are constants. An optimizer that trains copies of its own of the parameters, such as fp32 ones of
    bf16 parameters, would undo the outer step.

    A rank takes, beside the model and the optimizer's state, two flat vectors of the model's size (the anchor, and the
    outer momentum if there is any), and one more during an outer step; in fp32, or in fp64 if a parameter is.

    A worker's model may be sharded over ranks of its own (`fully_shard`, DTensors): what is averaged, kept and saved is
    each rank's part of it, and `group` is of the ranks that hold the same part of other workers' models.

    A worker whose weights are not finite contributes nothing to the outer step and restarts from the anchor with a
    fresh optimizer state.

    To save a run, save `state_dict()` with the states of model, optimizer, scheduler and data: they differ between
    ranks, but for the model's at the end of a round (`is_round_end`). To resume, construct everything, then load the
    states: construction gives all ranks the lowest rank's weights.

    Attributes:
        round: rounds that were completed.
        updates: updates taken in this round.
        last_step: what the last outer step did; None before the first one.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        updates_per_round: int = 500, outer: OuterSGD = OuterSGD(), group: dist.ProcessGroup | None = None,
        averager: Averager | None = None, streaming: Streaming = Streaming(), timeout_seconds: float = 1800.0,
    ) -> None:  # fmt: skip
        """Compare the ranks' models and settings, and give all of them the lowest rank's weights. Collective.

        Args:
            model: on the device where it is trained, in its final types.
            optimizer: the optimizer of its parameters; several (Muon beside AdamW, say) as a list.
            updates_per_round: H, the updates between two outer steps.
            outer: the optimizer of the anchor.
            group: the ranks, each of which has one worker, or the same part of one; None: the default process group.
            averager: how pseudo-gradients travel; None: in full precision.
            streaming: how averages are spread over a round, and hidden behind updates.
            timeout_seconds: how long a rank waits for the others, whose rounds may take longer than its own; at most
                the timeout of the process group.

        Raises:
            ValueError: model, optimizer or settings cannot be used, or differ between ranks; one line.
            PeerLostError: another rank is gone, or did not come in time.
        """
        if not isinstance(updates_per_round, int) or updates_per_round < 1:
            raise ValueError(f"updates_per_round={updates_per_round}: must be a whole number >= 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds}: must be > 0")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._optimizers, self._streaming = optimizers, streaming
        self._schedule = FragmentSchedule(updates_per_round, streaming.fragments, streaming.delay_updates)
        self._parameters = TrainedParameters(model, optimizers)
        self._buffers = AveragedBuffers(unwrapped(model))
        self._group = group_of(group, self._parameters.device, timeout_seconds)
        ranks = self._group.ranks if self._group else ()
        check_data_parallel(model, ranks)
        self._shards = self._parameters.shards(ranks, timeout_seconds)
        self._timeout_seconds = timeout_seconds
        averager = averager or FullPrecision(self._parameters.dtype)
        if averager.keeps_residual and outer.radial:
            rule = "restores lengths, which error feedback would count twice; choose one of them"
            raise ValueError(f"outer: radial={outer.radial} {rule}")
        if self._shards.ranks and outer.radial:
            raise ValueError(f"outer: radial={outer.radial} needs whole tensors; it does not go with a sharded model")
        fragments = self._parameters.fragments(streaming.fragments)
        self._worker = AnchoredWorker(
            self._parameters, self._buffers, fragments, outer, averager, self._group, self._shards,
            is_delayed=streaming.delay_updates > 0,
        )  # fmt: skip
        self.round = self.updates = 0
        self.last_step: OuterStepReport | None = None
        self._awaits: int | None = None
        self._was_overwritten = False
        if self._group is not None:
            with self._contact():
                self._start_alike(self._group, outer, averager)
        self._stepped: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._has_failed = False

    @property
    def is_round_end(self) -> bool:
        """Whether no update has been taken in this round; without streaming all workers have the same weights then."""
        return self.updates == 0

    def __enter__(self) -> "DiLoCo":
        # Inside of a compiled optimizer step, too, the outer step is not compiled.
        hook: Any = torch.compiler.disable(self._count_step)
        self._handles = [optimizer.register_step_post_hook(hook) for optimizer in self._optimizers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self._settle()  # others wait for this rank's part
        if kind is None and self.updates:
            log.warning(
                "%d updates since the last outer step are in this rank's model alone; to average them, call "
                "outer_step() on all ranks at the end of the loop",
                self.updates,
            )

    def outer_step(self) -> OuterStepReport:
        """Take an outer step of the whole model now, however many updates the round has. Collective.

        All workers then have the weights of the anchor, also of a model that is averaged in fragments.

        Raises:
            ValueError: model or optimizer have changed since construction; one line.
            PeerLostError: another rank is gone, or did not come in time.
            RanksDisagreeError: the ranks do not hold the same anchor, or are in different rounds.
            RuntimeError: an outer step has failed before.
        """
        with self._attempt():
            self._complete()
            if self._awaits is not None:
                self._worker.mix(self._awaits)
            self.last_step = self._worker.step()
        self.round, self.updates, self._awaits = self.round + 1, 0, None
        return self.last_step

    def count_update(self) -> None:
        """Count an update, and do what is due after it; the optimizer's step does so by itself. Collective.

        Raises:
            ValueError, PeerLostError, RanksDisagreeError, RuntimeError: as `outer_step`.
        """
        self.updates += 1
        is_end = self.updates >= self._schedule.updates_per_round
        mixed = [fragment for fragment in self._schedule.mixed(self.updates) if fragment == self._awaits]
        started = (*self._schedule.started(self.updates), 0) if is_end else self._schedule.started(self.updates)
        if not mixed and not started:
            return
        with self._attempt():
            for fragment in mixed:
                self._complete()
                self._worker.mix(fragment)
                self._awaits = None
            if started and not self._schedule.delay_updates:
                self.last_step = self._worker.step(started)
            elif started:
                (self._awaits,) = started
                self._worker.start(self._awaits, is_delayed=True)
        if is_end:
            self.round, self.updates = self.round + 1, 0

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """The model has the anchor's weights while the block runs: evaluate and save these, not a worker's own.

        Waits for an average that is under way. Takes a copy of the parameters. Not collective.
        """
        self._settle()
        with self._worker.outer_weights():
            yield

    def state_dict(self) -> dict[str, Any]:
        """The outer state: but for the residual equal on all ranks. Its tensors are those in use, not copies.

        Waits for an average that is under way.
        """
        self._settle()
        return {
            **self._worker.tensors(),
            "changing_buffers": self._buffers.changing,
            "round": self.round,
            "steps": self._worker.steps,
            "awaits": self._awaits,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned; the model's own state is loaded before, and not by this.

        Raises:
            ValueError: it is the state of another model or optimizer; nothing has been loaded; one line.
        """
        self._settle()
        present = self._worker.tensors()
        for part, tensors in present.items():
            compare_tensors(part, state.get(part, {}), tensors)
        if lacking := [key for key in ("changing_buffers", "round", "updates", "steps", "awaits") if key not in state]:
            raise ValueError(f"state_dict: it has no {lacking[0]}; load what DiLoCo.state_dict returned")
        has_own = state["updates"] or not self._streaming.is_plain
        if has_own and self._was_overwritten and self._parameters.equal(self._worker.anchor):
            rule = "load the model's state after DiLoCo is constructed, which gives all ranks the lowest rank's weights"
            raise ValueError(f"state_dict: it is from the middle of a round; {rule}")
        for part, tensors in present.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[part][name])
        self._buffers.changing = state["changing_buffers"]
        self.round, self.updates, self._worker.steps = (int(state[key]) for key in ("round", "updates", "steps"))
        self._awaits = state["awaits"]

    def _start_alike(self, group: Group, outer: OuterSGD, averager: Averager) -> None:
        facts = {"updates_per_round": str(self._schedule.updates_per_round)}
        facts |= {f"outer {name}": str(value) for name, value in asdict(outer).items()}
        facts |= {f"streaming {name}": str(value) for name, value in asdict(self._streaming).items()}
        facts |= {
            "averaged part of the model": self._shards.place,
            **self._parameters.facts(),
            **self._buffers.facts(),
            "averager": described(averager),
        }
        if difference := configurations_differ(group, facts):
            raise ValueError(f"{difference}; start all ranks with the same model and settings")
        if dist.get_rank() == group.ranks[0] and (names := self._parameters.without_optimizer):
            log.warning("%d parameters that require gradients are in no optimizer: %s, ...", len(names), names[0])
        anchor = self._worker.anchor
        own = checksum(anchor)
        group.broadcast(anchor)
        self._was_overwritten = checksum(anchor) != own
        self._parameters.restart(anchor)
        self._buffers.broadcast(group, anchor.device)

    def _count_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if float(getattr(optimizer, "found_inf", 0)):
            return  # GradScaler has a fused optimizer's step called, too, when there is none to take
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self.count_update()

    def _settle(self) -> None:
        """Wait for what is under way."""
        if self._worker.is_under_way:
            with self._attempt():
                self._complete()

    def _complete(self) -> None:
        if self._worker.is_under_way:
            self.last_step = self._worker.complete()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Refuse to go on after a failure in such a block, of which ranks may have done different parts."""
        if self._has_failed:
            raise RuntimeError(f"an outer step has failed before; {RESTART}")
        self._has_failed = True  # until it has not
        self._parameters.check()
        with self._contact():
            yield
        self._has_failed = False

    def _contact(self) -> AbstractContextManager[None]:
        return contact(self._shards.met, f"outer step {self._worker.steps + 1}", self._timeout_seconds)
