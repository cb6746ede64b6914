"""DiLoCo (2311.08105) around anybody's training loop."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from adloco_dist.averaging.agreement import load_state, refuse, settings_in_words, state_of
from adloco_dist.averaging.averager import FullPrecision, Wire
from adloco_dist.averaging.checks import GO_ON
from adloco_dist.averaging.fragments import largest
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.in_place import AveragedBuffers, InPlace
from adloco_dist.averaging.outer_sgd import OuterSGD
from adloco_dist.averaging.outer_step import OuterStep
from adloco_dist.averaging.own_group import Connection
from adloco_dist.averaging.parameters import TrainedParameters, check_data_parallel, unwrapped
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.averaging.schedule import Action, Event, round_events
from adloco_dist.averaging.steps import StepCounter
from adloco_dist.members.members import Members
from adloco_dist.members.rounds import Rounds, timed
from adloco_dist.vectors import is_sharded

log = logging.getLogger(__name__)


class DiLoCo(Rounds):
    """Trains one worker per rank, and averages what the workers have learned every `updates_per_round` updates::

        with DiLoCo(model, optimizer, updates_per_round=500) as diloco:
            for batch in loader:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    An outer step is taken inside of the `optimizer.step()` that ends a round: the mean of anchor minus weights over the
    workers is the gradient of a step of `outer` on the anchor, from which all workers restart. Everything else in the
    loop is the user's: clipping, accumulation, schedulers, GradScaler, torch.compile, DistributedDataParallel within a
    worker, collectives of its own. An update is a call of the optimizer's `step`; it ends with the last of several
    optimizers, or with the backward pass in which they step. All ranks have to take the same number of updates: one
    that leaves the block earlier than the others, or by an exception, ends theirs, and they say which it was.

    Parameters that the optimizers hold and train are averaged, in the memory that they have. Frozen parameters must be
    equal on all ranks. Persistent buffers that training changes in the first round take the mean of the workers'
    values, all others are constants. Copies of the parameters in an optimizer's state (schedule-free, Lookahead, fp32
    copies of bf16 parameters) move with them; an optimizer that keeps copies elsewhere would undo the outer step.

    Beside the model and the optimizer's state, a rank holds two flat vectors of the model's size (the anchor, and the
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
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        updates_per_round: int = 500,
        outer: OuterSGD = OuterSGD(),
        group: dist.ProcessGroup | None = None,
        wire: Wire = Wire(),
        timeout_seconds: float = 1800.0,
        members: Members | None = None,
    ) -> None:
        """Compare the ranks' models and settings, and give all of them the lowest rank's weights. Collective.

        Args:
            model: on the device where it is trained, in its final types.
            optimizer: the optimizer of its parameters; several (Muon beside AdamW, say) as a list, in the order in
                which the loop steps them.
            updates_per_round: H, the updates between two outer steps.
            outer: the optimizer of the anchor.
            group: the ranks, each of which has one worker, or the same part of one; None: the default process group.
                Averages have connections of their own.
            wire: how pseudo-gradients travel: in how many bits, in how many fragments, and beside how many updates.
            timeout_seconds: how long a rank waits for the others, whose rounds may take longer than its own.
            members: those who average, instead of a group: whoever is there.

        Raises:
            ValueError: model, optimizer or settings cannot be used, or differ between ranks; one line.
            PeerLostError: another rank is gone, or did not come in time.
        """
        refuse(updates_per_round, timeout_seconds, outer, wire)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._wire, is_delayed = wire, wire.delay_updates > 0
        self._events = round_events(updates_per_round, wire.fragments, wire.delay_updates)
        parameters, buffers = TrainedParameters(model, optimizers), AveragedBuffers(unwrapped(model))
        averager = wire.averager or FullPrecision(parameters.dtype)
        settings = settings_in_words(updates_per_round, outer, averager, wire)
        if members is not None and group is not None:
            raise ValueError("members: they are instead of a group; give one of both")
        if members is not None and any(map(is_sharded, parameters.tensors)):
            raise ValueError("members: the model is sharded over ranks, which members cannot be; give a group")
        if members is not None:
            facts = {**settings, **parameters.facts(), **buffers.facts()}
            members.join(facts, parameters.device, timeout_seconds, notice_rounds=3 if is_delayed else 2)
        shared = members.group if members else group_of(group, parameters.device, timeout_seconds)
        ranks = shared.ranks if shared and not members else ()
        check_data_parallel(model, ranks)
        division = parameters.division(wire.fragments, ranks, timeout_seconds)
        replica = InPlace(parameters, buffers, largest(division.fragments) if is_delayed else 0)
        outer_step = OuterStep([replica], parameters.vector(), division, outer, averager, buffers)
        connection = members or Connection(shared, division.shards.ranks, timeout_seconds, is_delayed)
        super().__init__(outer_step, connection, settings)
        self._steps = StepCounter(optimizers, self.count_update)

    @property
    def is_round_end(self) -> bool:
        """Whether no update has been taken in this round; all workers then have the same weights, unless there are
        fragments or a delay."""
        return self.updates == 0

    def __enter__(self) -> "DiLoCo":
        with self._connection.contact(self._outer.steps + 1):
            self._connection.connect()
        self._steps.is_open = self._steps.is_used = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._steps.is_open = False
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """End averaging on this rank, as the end of the block does; the next outer step connects the ranks again.

        Waits for an average that is under way. If an error ends it, it does without that: `outer_weights` then has the
        average before. Ranks that wait for this one, or will, raise PeerLostError, and say that it has left.
        """
        if error is None:
            self._settle()
        if error is None and not self.holds_anchor:
            count = f"{self.updates} updates since the last outer step" if self._wire.is_plain else "some updates"
            remedy = "to average them, call outer_step() on all ranks at the end of the loop"
            log.warning(f"{count} are in this rank's model alone; {remedy}")
        self._has_failed |= self._outer.abandon()  # of an error: else it has arrived
        self._connection.leave(f"after {self.updates} updates of round {self.round + 1}", error)

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
            self._outer.mix_awaited()
            self.last_step, self.holds_anchor = self._step(range(len(self._outer.fragments))), True
            self._end_round()
        self._steps.is_used = True
        assert self.last_step is not None
        return self.last_step

    def count_update(self) -> None:
        """Count an update, and do what is due after it; within the block the optimizer's step does so by itself.

        Collective. It raises the errors of `outer_step`.
        """
        if self._replica.copies.names is None:
            self._replica.copies.find()
        self._steps.is_used = True
        self.updates += 1
        self.holds_anchor = False
        for event in self._events:
            # Nothing is there to be mixed before the first average, nor after `outer_step`.
            is_due = event.action is not Action.mix or event.fragment == self._replica.awaits
            if event.update == self.updates and is_due:
                with self._attempt():
                    self._take(event)
        if self.updates == self._events[-1].update:
            self.holds_anchor = self._wire.is_plain
            self._end_round()

    def _take(self, event: Event) -> None:
        if event.action is Action.mix:
            self._complete()
            self._outer.mix(event.fragment)
        elif self._wire.delay_updates:
            start = partial(self._outer.start, event.fragment, self._connection.group, is_delayed=True)
            self._started = timed(start)
            self._outer.begin()
        else:
            self.last_step = self._step([event.fragment])

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """The model has the anchor's weights while the block runs: evaluate and save these, not a worker's own.

        Waits for an average that is under way. Takes a copy of the parameters. Not collective.
        """
        self._settle()
        with self._replica.outer_weights(self._outer.anchor):
            yield

    def state_dict(self) -> dict[str, Any]:
        """This rank's outer state. Its tensors are those in use, not copies.

        What is the same on all ranks has the same name on all; what is not, and each part of a sharded model, has a
        name of its own, so that torch.distributed.checkpoint keeps all of it. It waits for an average that is under
        way. After one that has failed, or was left to travel, it is the state before that average was started.

        Raises:
            RuntimeError: this rank has failed within a step, when its average had arrived.
        """
        if self._outer.is_torn:
            raise RuntimeError(f"an outer step has failed before; {GO_ON}")
        self._settle()
        return {
            **state_of(self._outer, self._connection.worker),
            "settings": dict(self._settings),
            "round": self.round,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`; the states of model and optimizer are loaded before, and not by this.

        At the end of a round, without fragments, delay and residual, ranks do not differ: any rank's state will do.

        Raises:
            ValueError: it is the state of another model, optimizer, rank or setting, or the model does not have the
                weights that it had; nothing has been loaded; one line.
        """
        if isinstance(self._connection, Members) and self._connection.group:
            raise ValueError(
                "state_dict: other members are there, whose anchor this one has; load it on the first alone"
            )
        self._settle()
        load_state(state, self._outer, self._connection.worker, self._settings, self._wire.is_plain)
        self.round, self.updates = int(state["round"]), int(state["updates"])
        self.holds_anchor = self._replica.parameters.equal(self._outer.anchor)
