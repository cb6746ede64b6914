"""DiLoCo (2311.08105) around anybody's training loop."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from adloco_dist.averaging.alike import refuse, settings_in_words, start_alike
from adloco_dist.averaging.anchored import AnchoredWorker, OuterStepReport
from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.buffers import AveragedBuffers
from adloco_dist.averaging.checks import RESTART, PeerLostError
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.outer import OuterSGD
from adloco_dist.averaging.own_group import Connection
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.saved import Present, check_state
from adloco_dist.averaging.schedule import FragmentSchedule, Streaming
from adloco_dist.averaging.steps import StepCounter
from adloco_dist.averaging.wrappers import check_data_parallel, unwrapped

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
    worker, collectives of its own. An update is a call of the optimizer's `step`; of several optimizers it ends with
    the last one's, and where optimizers step within the backward pass, with that pass. All ranks have to take the same
    number of updates: one that leaves the block earlier than the others, or by an exception, ends theirs, and they say
    which it was.

    Parameters that the optimizers hold and train are averaged, in the memory that they have. Frozen parameters must be
    equal on all ranks. Persistent buffers that training changes in the first round take the mean of the workers'
    values, all others are constants. Copies of the parameters in an optimizer's state (schedule-free, Lookahead, fp32
    copies of bf16 parameters) move with them; an optimizer that keeps copies elsewhere would undo the outer step.

    A rank takes, beside the model and the optimizer's state, two flat vectors of the model's size (the anchor, and the
    outer momentum if there is any), and one more during an outer step; in fp32, or in fp64 if a parameter is.

    A worker's model may be sharded over ranks of its own (`fully_shard`, DTensors): what is averaged, kept and saved is
    each rank's part of it, and `group` is of the ranks that hold the same part of other workers' models.

    A worker whose weights are not finite contributes nothing to the outer step and restarts from the anchor with a
    fresh optimizer state.

    To save a run, save `state_dict()` with the states of model, optimizer, scheduler and data, on each rank its own. To
    resume, construct everything, load the states of model and optimizer, then this one: construction gives all ranks
    the lowest rank's weights.

    Attributes:
        round: rounds that were completed.
        updates: updates taken in this round.
        last_step: what the last outer step did; None before the first one.
        holds_anchor: whether the model has the anchor's weights, which are the same on all ranks: after an outer step
            of the whole model that did not travel.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        updates_per_round: int = 500, outer: OuterSGD = OuterSGD(), group: dist.ProcessGroup | None = None,
        averager: Averager | None = None, streaming: Streaming = Streaming(), timeout_seconds: float = 1800.0,
    ) -> None:  # fmt: skip
        """Compare the ranks' models and settings, and give all of them the lowest rank's weights. Collective.

        Args:
            model: on the device where it is trained, in its final types.
            optimizer: the optimizer of its parameters; several (Muon beside AdamW, say) as a list, in the order in
                which the loop steps them.
            updates_per_round: H, the updates between two outer steps.
            outer: the optimizer of the anchor.
            group: the ranks, each of which has one worker, or the same part of one; None: the default process group.
                Averages have connections of their own.
            averager: how pseudo-gradients travel; None: in full precision.
            streaming: how averages are spread over a round, and hidden behind updates.
            timeout_seconds: how long a rank waits for the others, whose rounds may take longer than its own.

        Raises:
            ValueError: model, optimizer or settings cannot be used, or differ between ranks; one line.
            PeerLostError: another rank is gone, or did not come in time.
        """
        if not isinstance(updates_per_round, int) or updates_per_round < 1:
            raise ValueError(f"updates_per_round={updates_per_round}: must be a whole number >= 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds}: must be > 0")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._streaming = streaming
        self._schedule = FragmentSchedule(updates_per_round, streaming.fragments, streaming.delay_updates)
        self._parameters = TrainedParameters(model, optimizers)
        self._buffers = AveragedBuffers(unwrapped(model))
        shared = group_of(group, self._parameters.device, timeout_seconds)
        ranks = shared.ranks if shared else ()
        check_data_parallel(model, ranks)
        shards = self._parameters.shards(ranks, timeout_seconds)
        self._connection = Connection(shared, shards.met, timeout_seconds, streaming.delay_updates > 0)
        averager = averager or FullPrecision(self._parameters.dtype)
        refuse(outer, averager, is_sharded=bool(shards.ranks))
        fragments = self._parameters.fragments(streaming.fragments)
        self._worker = AnchoredWorker(
            self._parameters, self._buffers, fragments, outer, averager, self._connection, shards,
            is_delayed=streaming.delay_updates > 0,
        )  # fmt: skip
        self._settings = settings_in_words(updates_per_round, outer, averager, streaming)
        self.round = self.updates = 0
        self.last_step: OuterStepReport | None = None
        self.holds_anchor = True
        self._awaits: int | None = None
        self._has_failed = False
        if shared is not None:
            facts = {**self._settings, "averaged part of the model": shards.place}
            with self._contact():
                start_alike(shared, facts, self._parameters, self._buffers, self._worker.anchor)
        self._name = f"worker {shared.index} of {len(ranks)}" if shared else "worker 0 of 1"
        self._steps = StepCounter(optimizers, self.count_update)

    @property
    def is_round_end(self) -> bool:
        """Whether no update has been taken in this round; without streaming all workers have the same weights then."""
        return self.updates == 0

    def __enter__(self) -> "DiLoCo":
        with self._contact():
            self._connection.connect()
        self._steps.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._steps.close()
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """End averaging on this rank, as the end of the block does; the next outer step connects the ranks again.

        Waits for an average that is under way. Where there is an error it does without it: `outer_weights` then has the
        average before it. Ranks that wait for this one, or will, raise PeerLostError, and say that it has left.

        Args:
            error: because of which it ends.
        """
        if error is None:
            self._settle()
        if error is None and not self.holds_anchor:
            count = f"{self.updates} updates since the last outer step" if self._streaming.is_plain else "some updates"
            remedy = "to average them, call outer_step() on all ranks at the end of the loop"
            log.warning(f"{count} are in this rank's model alone; {remedy}")
        are_lost = self._has_failed and isinstance(error, PeerLostError)
        self._has_failed |= self._worker.abandon()  # of an error: else it has arrived
        self._connection.leave(None if are_lost else f"after {self.updates} updates of round {self.round + 1}", error)

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
        self.round, self.updates, self._awaits, self.holds_anchor = self.round + 1, 0, None, True
        self._steps.note_count()
        return self.last_step

    def count_update(self) -> None:
        """Count an update, and do what is due after it; within the block the optimizer's step does so by itself.

        Collective.

        Raises:
            ValueError, PeerLostError, RanksDisagreeError, RuntimeError: as `outer_step`.
        """
        if self._parameters.copies.names is None:
            self._parameters.find_copies()
        self._steps.note_count()
        self.updates += 1
        self.holds_anchor = False
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
            self.holds_anchor = self._streaming.is_plain

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """The model has the anchor's weights while the block runs: evaluate and save these, not a worker's own.

        Waits for an average that is under way. Takes a copy of the parameters. Not collective.
        """
        self._settle()
        with self._worker.outer_weights():
            yield

    def state_dict(self) -> dict[str, Any]:
        """This rank's outer state. Its tensors are those in use, not copies.

        What is the same on all ranks has the same name on all; what is not, and each part of a sharded model, has a
        name of its own, so that torch.distributed.checkpoint keeps all of it.

        Waits for an average that is under way. A RuntimeError: an outer step has failed before, or was left to travel.
        """
        self._refuse_after_failure()
        self._settle()
        return {
            **self._worker.tensors(self._name),
            "checksums": {self._name: self._parameters.checksums()},
            "changing_buffers": self._buffers.changing,
            "copies": self._parameters.copies.names,
            "settings": dict(self._settings),
            "round": self.round,
            "steps": self._worker.steps,
            "awaits": self._awaits,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`; the states of model and optimizer are loaded before, and not by this.

        At the end of a round, without streaming and residual, ranks do not differ: any rank's state will do.

        Raises:
            ValueError: it is the state of another model, optimizer, rank or setting, or the model does not have the
                weights that it had; nothing has been loaded; one line.
        """
        self._settle()
        tensors = self._worker.tensors(self._name)
        checksums, is_plain = self._parameters.checksums(), self._streaming.is_plain
        check_state(state, Present(self._name, tensors, checksums, self._settings, is_plain))
        for part, present in tensors.items():
            for name, tensor in present.items():
                tensor.copy_(state[part][name])
        self._buffers.changing, self._parameters.copies.names = state["changing_buffers"], state["copies"]
        self.round, self.updates, self._worker.steps = (int(state[key]) for key in ("round", "updates", "steps"))
        self._awaits = state["awaits"]
        self.holds_anchor = self._parameters.equal(self._worker.anchor)

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
        self._refuse_after_failure()
        self._has_failed = True  # until it has not
        self._parameters.check()
        with self._contact():
            self._connection.connect()
            yield
        self._has_failed = False

    def _refuse_after_failure(self) -> None:
        if self._has_failed:
            raise RuntimeError(f"an outer step has failed before; {RESTART}")

    def _contact(self) -> AbstractContextManager[None]:
        return self._connection.contact(f"outer step {self._worker.steps + 1}")
