"""The inner phase: every worker takes its updates from its trainer's anchor; no communication."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Settings
from adloco_dist.data.batch import Batch
from adloco_dist.data.streams import RowStreams
from adloco_dist.data.tokens import Store
from adloco_dist.decisions.plan import RoundPlan
from adloco_dist.decisions.schedule import batch_scale, learning_rate
from adloco_dist.decisions.switch import least, pass_size
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.lane import Lane
from adloco_dist.pool.residence import Residence
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.round.estimate import GradientEstimator
from adloco_dist.round.gradient import accumulate_gradient
from adloco_dist.round.phases import timed, wait_for


@dataclass
class InnerResult:
    """What a trainer's workers on this rank did."""

    loss_sum: float = 0.0
    """Sum over the workers of their mean training loss, in nats per target."""
    seconds: float = 0.0
    """The phase's wall time, dealt to the rank's trainers by the sequences that their workers took."""
    pass_seconds_per_sequence: float = 0.0
    """Summed over the workers, taken from their last updates; 0 unless switch.n=auto wants to know."""
    num_targets: int = 0
    """Tokens (or labels) that the workers' batches predicted; padding is none."""
    data_seconds: float = 0.0
    """Summed over the workers: time until their batches were there."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""


@dataclass(frozen=True)
class _Turn:
    """One worker's updates of the round."""

    trainer: Trainer
    worker: Worker
    result: InnerResult = field(default_factory=InnerResult)


@dataclass(frozen=True)
class InnerPhase:
    """The inner phase of one round on this rank."""

    plan: RoundPlan
    settings: Settings
    store: Store | RowStreams
    estimators: Mapping[int, GradientEstimator] = field(default_factory=dict)
    """By trainer: who watches its workers' first gradients. A trainer that is missing is not measured."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Ends the phase after the updates that are being taken."""
    is_resumed: bool = False
    """Whether workers go on where they stand in the round, rather than begin it."""

    def run(
        self, trainers: Sequence[Trainer], lanes: Sequence[Lane], residence: Residence | None = None
    ) -> dict[int, InnerResult]:
        """All updates of all workers: one worker after the other, or as many at once as there are lanes.

        Args:
            lanes: one alone, or one for each worker that has its turn at the same time; they share nothing but data.
            residence: brings workers to the device for their turns; None: they are all there.

        Returns:
            By trainer.
        """
        turns = [_Turn(trainer, worker) for trainer in trainers for worker in trainer.workers]
        device = lanes[0].flat_model.device
        if not self.is_resumed:
            for turn in turns:
                turn.worker.begin_round(self.settings.inner.reset_each_round)
        wait_for(device)
        start = time.perf_counter()
        if not self.plan.is_concurrent:
            by_worker = {turn.worker: turn for turn in turns}
            for worker in residence.turns(list(by_worker)) if residence else by_worker:
                self._take(by_worker[worker], lanes[0])
        elif device.type == "cuda":
            self._in_streams(turns, lanes)
        else:
            self._in_threads(turns, lanes)
        wait_for(device)
        return self._by_trainer(turns, time.perf_counter() - start)

    def _in_threads(self, turns: Sequence[_Turn], lanes: Sequence[Lane]) -> None:
        """Every lane takes its share of the turns in a thread of its own, with its share of the CPU's threads."""
        all_threads = torch.get_num_threads()

        def take(number: int) -> None:
            torch.set_num_threads(max(1, all_threads // len(lanes)))
            for turn in turns[number :: len(lanes)]:
                self._take(turn, lanes[number])

        with ThreadPoolExecutor(len(lanes)) as executor:
            list(executor.map(take, range(len(lanes))))
        torch.set_num_threads(all_threads)

    def _in_streams(self, turns: Sequence[_Turn], lanes: Sequence[Lane]) -> None:
        """Update by update, one of every lane in turn: the device overlaps what is on different streams.

        One thread issues everything, so random numbers come in the same order in every run.
        """
        present = torch.cuda.current_stream()
        for lane in lanes:
            if lane.stream:
                lane.stream.wait_stream(present)
        for first in range(0, len(turns), len(lanes)):
            running = [self._on_stream(turn, lane) for turn, lane in zip(turns[first:], lanes, strict=False)]
            for _ in zip_longest(*running):
                pass
        for lane in lanes:
            if lane.stream:
                present.wait_stream(lane.stream)

    def _on_stream(self, turn: _Turn, lane: Lane) -> Iterator[None]:
        updates = self._updates(turn, lane)
        going_on = True
        while going_on:
            with torch.cuda.stream(lane.stream):
                going_on = next(updates, "ended") is None
            yield

    def _take(self, turn: _Turn, lane: Lane) -> None:
        for _ in self._updates(turn, lane):
            pass

    def _updates(self, turn: _Turn, lane: Lane) -> Iterator[None]:
        """The updates of one worker; stops after each."""
        with about(f"trainer {turn.trainer.id}, worker {turn.worker.id}"):
            yield from self._each_update(turn, lane)

    def _each_update(self, turn: _Turn, lane: Lane) -> Iterator[None]:
        settings, plan, trainer, worker, result = self.settings, self.plan, turn.trainer, turn.worker, turn.result
        clip_norm, batch, gradient = settings.inner.clip_norm, plan.batches[trainer.id], lane.flat_model.gradient
        rate_scale = batch_scale(settings, batch.local_batch)
        seconds: dict[str, float] = {}
        if worker.updates_done and trainer.id in self.estimators:
            lane.flat_model.point_at(trainer.anchor.to(gradient.device))
            self._gradient(turn, lane, 0)  # seen before the interruption, by an estimator that is no more
        worker.take_turn(lane.flat_model)
        for update in range(worker.updates_done, plan.updates):
            if self.stop.is_heard and not isinstance(lane.module, DistributedDataParallel):  # which must stop together
                return
            is_timed = settings.switch.n == "auto" and update == plan.updates - 1
            with timed(seconds, "passes", gradient.device) if is_timed else nullcontext():
                loss, num_targets = self._gradient(turn, lane, update)
                worker.loss_sum += loss
                worker.num_targets += num_targets
            if clip_norm is not None:
                norm = torch.linalg.vector_norm(gradient)
                gradient.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0))  # on the device: no synchronisation
            worker.set_learning_rate(learning_rate(settings.inner, plan.progress, update) * rate_scale)
            worker.optimizer.step()
            lane.flat_model.store_buffers()
            worker.updates_done = update + 1
            yield
        result.loss_sum, result.num_targets = float(worker.loss_sum) / plan.updates, worker.num_targets
        result.pass_seconds_per_sequence = seconds.get("passes", 0.0) / batch.local_batch

    def _gradient(self, turn: _Turn, lane: Lane, update: int) -> tuple[torch.Tensor, int]:
        """Fill the lane's gradient with that of one update, at the weights that its module points at.

        Returns:
            The mean loss, and the number of targets.
        """
        plan, trainer, worker = self.plan, turn.trainer, turn.worker
        batch = plan.batches[trainer.id]
        start = time.perf_counter()
        ids: Any = trainer.shard.ids(worker.id, plan.layout.num_workers(trainer.id), update, batch.local_batch)
        sequences = self.store.batch(ids).to(lane.flat_model.device)
        turn.result.data_seconds += time.perf_counter() - start
        estimator = self.estimators.get(trainer.id) if update == 0 else None
        # Seeded by who and when, never by where: hosting does not change a random number.
        seed = (self.settings.seed, trainer.id, worker.id, plan.round, update)
        notes = turn.result.notes
        loss = _update_gradient(lane, worker.id, sequences, batch.batch_limit, seed, estimator, notes)
        return loss, sequences.total_targets

    def _by_trainer(self, turns: Sequence[_Turn], seconds: float) -> dict[int, InnerResult]:
        """The turns' results added up, in the order of the turns whatever came first."""
        sequences = [self.plan.batches[turn.trainer.id].local_batch for turn in turns]
        total = sum(sequences)
        results: dict[int, InnerResult] = {}
        for turn, count in zip(turns, sequences, strict=True):
            result = results.setdefault(turn.trainer.id, InnerResult())
            result.loss_sum += turn.result.loss_sum
            result.seconds += round(seconds * count / total, 6)
            result.pass_seconds_per_sequence += turn.result.pass_seconds_per_sequence
            result.num_targets += turn.result.num_targets
            result.data_seconds += turn.result.data_seconds
            result.notes += turn.result.notes
        return results


def _update_gradient(
    lane: Lane, worker: int, batch: Batch, limit: int | None, seed: tuple[int, ...],
    estimator: GradientEstimator | None, notes: list[str],
) -> torch.Tensor:  # fmt: skip
    """The gradient of one update's batch; where memory runs out, the same batch again in passes of half the size.

    Returns:
        The batch's mean loss, a scalar on the device.

    Raises:
        torch.OutOfMemoryError: not even one sequence fits (RuntimeError where it is the CPU's memory).
    """
    while True:
        size = pass_size(len(batch), least(limit, lane.flat_model.capacity))
        try:
            _seed(*seed)
            watcher = estimator.watch(worker, lane) if estimator else None
            return accumulate_gradient(lane.flat_model, lane.module, batch, size, watcher, lane.losses)
        except RuntimeError as error:
            # Other ranks of DistributedDataParallel wait in the pass that failed: it cannot be repeated.
            if not is_out_of_memory(error) or size == 1 or isinstance(lane.module, DistributedDataParallel):
                raise
        # Outside of the handler: the error's traceback holds the activations of the failed pass.
        lane.flat_model.capacity = size // 2
        lane.flat_model.load_buffers()  # as they were before it
        free_device_memory()
        notes.append(
            f"out of memory with {size} sequences in a pass: the update is repeated, and goes on, in passes of at most "
            f"{size // 2}"
        )


def _seed(*key: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
