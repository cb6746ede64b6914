"""The inner phase: every worker takes its updates from its trainer's anchor; no communication."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch.profiler import record_function

from adloco_dist.cluster.devices import timed, wait_for
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Settings
from adloco_dist.data.protocols import Batch
from adloco_dist.policy.passes import Passes
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import InnerReport, sums_by_update
from adloco_dist.policy.schedule import rate_of_update
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.estimator import GradientEstimator
from adloco_dist.pool.gradient import AccumulatedLoss, accumulate_gradient, micro_batch_size, scale_and_clip
from adloco_dist.pool.offload import Offload
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker


@dataclass(frozen=True)
class _Task:
    """One worker's next updates of the round."""

    trainer: Trainer
    worker: Worker
    until: int
    """Updates that it will have taken."""
    result: InnerReport = field(default_factory=InnerReport)


@dataclass(frozen=True)
class InnerPhase:
    """The inner phase of one round on this rank."""

    plan: RoundPlan
    settings: Settings
    estimator: GradientEstimator | None = None
    """Watches the workers' first gradients; None: they are not measured."""
    stop: StopRequest = field(default_factory=StopRequest)
    """May end the phase after the updates that are being taken."""
    event: int = 0
    """The event of the plan that the phase leads to."""

    def run(
        self,
        trainers: Sequence[Trainer],
        slots: Sequence[ComputeSlot],
        offload: Offload | None = None,
        until: int | None = None,
    ) -> dict[int, InnerReport]:
        """Take the updates of all workers: one worker after the other, or as many at once as there are slots.

        Args:
            slots: one, or one for each worker that computes at the same time; they share nothing except data.
            offload: brings workers to the device for their turns; None: they are all there.
            until: updates of the round that are taken in the end, earlier ones included; None: all, from the first.

        Returns:
            The reports by trainer: losses and targets of the round so far, and what was spent in this call.
        """
        if until is None:
            until = self.plan.updates
            for worker in (worker for trainer in trainers for worker in trainer.workers):
                worker.begin_round(self.settings.inner.reset_each_round)
        tasks = [
            _Task(trainer, worker, self.plan.updates_by(until, trainer.id, worker.id))
            for trainer in trainers
            for worker in trainer.workers
        ]
        device = slots[0].flat_model.device
        for task in tasks:
            task.worker.weight = self.plan.updates_of(task.trainer.id, task.worker.id) / self.plan.updates
        wait_for(device)
        start = time.perf_counter()
        if not self.plan.is_concurrent:
            by_worker = {task.worker: task for task in tasks}
            for worker in offload.turns(list(by_worker)) if offload else by_worker:
                self._turn(by_worker[worker], slots[0])
        elif device.type == "cuda":
            self._in_streams(tasks, slots)
        else:
            self._in_threads(tasks, slots)
        wait_for(device)
        return self._by_trainer(tasks, time.perf_counter() - start)

    def _turn(self, task: _Task, slot: ComputeSlot) -> None:
        """Take all updates of a task."""
        with record_function(f"trainer {task.trainer.id}, worker {task.worker.id}"):
            for _ in self._updates(task, slot):
                pass

    def _in_threads(self, tasks: Sequence[_Task], slots: Sequence[ComputeSlot]) -> None:
        """Every slot takes its share of the workers in a thread of its own, with its share of the CPU's threads."""
        all_threads = torch.get_num_threads()

        def take(number: int) -> None:
            torch.set_num_threads(max(1, all_threads // len(slots)))
            for task in tasks[number :: len(slots)]:
                self._turn(task, slots[number])

        with ThreadPoolExecutor(len(slots)) as executor:
            list(executor.map(take, range(len(slots))))
        torch.set_num_threads(all_threads)

    def _in_streams(self, tasks: Sequence[_Task], slots: Sequence[ComputeSlot]) -> None:
        """Take one update of every slot in turn: the device overlaps what is on different streams.

        One thread issues everything, so random numbers come in the same order in every run.
        """
        present = torch.cuda.current_stream()
        for slot in slots:
            if slot.stream:
                slot.stream.wait_stream(present)
        for first in range(0, len(tasks), len(slots)):
            running = [self._on_stream(task, slot) for task, slot in zip(tasks[first:], slots, strict=False)]
            for _ in zip_longest(*running):
                pass
        for slot in slots:
            if slot.stream:
                present.wait_stream(slot.stream)

    def _on_stream(self, task: _Task, slot: ComputeSlot) -> Iterator[None]:
        updates = self._updates(task, slot)
        while True:
            with torch.cuda.stream(slot.stream):
                if not next(updates, 0):
                    return
            yield

    def _updates(self, task: _Task, slot: ComputeSlot) -> Iterator[int]:
        """Take the updates of one worker; after each, yields how many it has taken in the round."""
        settings, plan, trainer, worker, result = self.settings, self.plan, task.trainer, task.worker, task.result
        clip_norm, gradient = settings.inner.clip_norm, slot.flat_model.gradient
        num_workers = plan.layout.num_workers(trainer.id)
        num_updates = plan.updates_of(trainer.id, worker.id)
        with about(f"trainer {trainer.id}, worker {worker.id}"):
            worker.attach(slot.flat_model)
            for update in range(worker.updates_done, task.until):
                if self._is_stopped(slot):
                    return
                is_timed = self.estimator and settings.batching.measures_times and update == num_updates - 1
                with timed(gradient.device) if is_timed else nullcontext() as timing:
                    # Seeded by trainer, worker and update, never by rank: placement changes no random number.
                    seed = (settings.seed, trainer.id, worker.id, plan.round, update)
                    sequences, estimator = self._read(task, slot, update, seed), self.estimator if update == 0 else None
                    done = _update_gradient(slot, (trainer.id, worker.id), sequences, seed, estimator, result.notes)
                    worker.loss_sum += done.mean
                    if settings.run.step_losses:
                        worker.step_losses.append(done.mean)
                    worker.num_targets += done.num_targets
                if timing:
                    result.passes.append(Passes(done.micro_batches, len(sequences), timing.seconds))
                scale_and_clip(slot.flat_model, done.scale, clip_norm)
                place = update * plan.updates // num_updates  # the last update of slower workers has the same rate
                worker.set_learning_rate(rate_of_update(settings, num_workers, plan.rhythm, plan.progress, place))
                worker.step()
                slot.flat_model.store_buffers()
                worker.updates_done = update + 1
                yield worker.updates_done
        result.loss_sum, result.num_targets = worker.mean_loss(num_updates), worker.num_targets
        if settings.run.step_losses:
            result.step_losses = worker.read_step_losses()

    def _is_stopped(self, slot: ComputeSlot) -> bool:
        """Whether no further update is taken; ranks that compute together stop together."""
        if slot.averager is not None:
            return False
        return not slot.flat_model.shards.all_agree(not self.stop.ends_before((self.plan.round, self.event)))

    def _read(self, task: _Task, slot: ComputeSlot, update: int, seed: Sequence[int]) -> Batch:
        """Bring the sequences of an update to the slot's device."""
        plan, trainer, worker = self.plan, task.trainer, task.worker
        start = time.perf_counter()
        _seed(slot.flat_model.device, *seed)  # items of a user's own data set may be augmented at random
        local_batch, taken = plan.batches[trainer.id].local_batch, plan.updates_of_workers(trainer.id)
        batch: Any = trainer.cursor.batch(worker.id, update, local_batch, taken)
        batch = batch.to(slot.flat_model.device)
        task.result.data_seconds += time.perf_counter() - start
        return batch

    def _by_trainer(self, tasks: Sequence[_Task], seconds: float) -> dict[int, InnerReport]:
        """The results of the turns, added up in their order, whichever ended first."""
        sequences = [self.plan.batches[task.trainer.id].local_batch for task in tasks]
        total = sum(sequences)
        results: dict[int, InnerReport] = {}
        for task, count in zip(tasks, sequences, strict=True):
            result = results.setdefault(task.trainer.id, InnerReport())
            result.loss_sum += task.result.loss_sum
            result.seconds += round(seconds * count / total, 6)
            result.passes = _added(result.passes, task.result.passes)
            result.num_targets += task.result.num_targets
            result.data_seconds += task.result.data_seconds
            result.step_losses = sums_by_update([result.step_losses, task.result.step_losses])
            result.notes += task.result.notes
        return results


def _added(passes: Sequence[Passes], others: Sequence[Passes]) -> list[Passes]:
    """The passes of several workers that have taken the same updates, as one; those of some may be missing."""
    pairs = zip_longest(passes, others)
    return [replace(one or other, seconds=sum(each.seconds for each in (one, other) if each)) for one, other in pairs]


def _update_gradient(
    slot: ComputeSlot,
    worker: tuple[int, int],
    batch: Batch,
    seed: Sequence[int],
    estimator: GradientEstimator | None,
    notes: list[str],
) -> AccumulatedLoss:
    """Accumulate the gradient of one update; where memory runs out, once more in micro-batches of half the size.

    Args:
        worker: the ids of its trainer and of the worker.
        estimator: watches the gradient; None: it is not measured.

    Raises:
        torch.OutOfMemoryError: not even one sequence fits (RuntimeError where it is the CPU's memory).
    """
    while True:
        size = micro_batch_size(len(batch), slot.flat_model.capacity)
        try:
            # Ranks that share a batch out draw numbers of their own.
            shards = slot.flat_model.shards
            _seed(slot.flat_model.device, *seed, *([shards.index] if shards.ranks else []))
            watcher = estimator.watch(worker) if estimator else None
            return accumulate_gradient(slot.flat_model, slot.objective, batch, size, watcher, slot.averager)
        except RuntimeError as error:
            # Ranks that average gradients wait in the backward pass that failed: it cannot be repeated.
            if not is_out_of_memory(error) or size == 1 or slot.is_shared:
                raise
        # Outside of the handler: the error's traceback holds the activations of the failed pass.
        slot.flat_model.capacity = size // 2
        slot.flat_model.load_buffers()  # as they were before it
        free_device_memory()
        notes.append(
            f"out of memory with {size} sequences in a micro-batch: the update is repeated in micro-batches of at most "
            f"{size // 2}"
        )


def _seed(device: torch.device, *key: int) -> None:
    """Seed the generators of the CPU and of the device, as `torch.manual_seed` does.

    That function also queues the seed for every kind of device that is not in use, each time with the text of the whole
    call stack, which takes longer than reading a batch.
    """
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
