"""Whether a rank's instances compute one after the other or concurrently: what is possible, and what is faster."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from adloco_dist.config import Concurrency, SettingsError
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.pool.capacity import is_out_of_memory
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.slot import ComputeSlot, further_slot
from adloco_dist.round.inner import InnerPhase

MEASURED_UPDATES = 3
MEASUREMENTS = 3
"""Measurements of each way, in turn; the fastest counts."""


def find_slots(pool: LocalPool, layout: Layout, recorded: bool | None = None) -> tuple[list[ComputeSlot], bool]:
    """The compute slots of this rank, and whether all ranks let their instances compute concurrently.

    Collective; the pool has its first slot alone. With instances.concurrency=auto both ways are measured with real
    updates, which are undone, unless `recorded` says what was measured at the run's first start.

    Raises:
        SettingsError: on all ranks, where a device or the model cannot do what is asked.
    """
    concurrency, first = pool.settings.instances.concurrency, pool.slots[0]
    decided = recorded if concurrency is Concurrency.auto else concurrency is not Concurrency.serial
    if decided is False:
        return [first], False
    obstacle = _obstacle(pool)
    num_workers = len(pool.workers)
    concurrent = num_workers if first.flat_model.device.type == "cuda" else min(num_workers, pool.runtime.threads)
    slots = [first]
    try:
        slots += [further_slot(first, pool.settings) for _ in range(0 if obstacle else concurrent - 1)]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        obstacle = f"there is no memory for the gradients of {concurrent} instances at once; use serial"
    control = pool.runtime.control
    if decided:
        with control.agreed():
            if obstacle:
                raise SettingsError.of("instances.concurrency", concurrency, obstacle)
        return slots, True
    measured = None if obstacle else _measure(pool, slots, layout)
    replies = [reply["seconds"] for reply in control.exchange({"seconds": measured})]
    if None in replies:
        return [first], False
    in_turn, concurrently = (max(seconds) for seconds in zip(*replies, strict=True))
    return (slots, True) if concurrently < in_turn else ([first], False)


def _obstacle(pool: LocalPool) -> str | None:
    """Why instances cannot compute concurrently here; None if they can."""
    settings, device = pool.settings, pool.flat_model.device
    concurrency = settings.instances.concurrency
    if settings.pool.ranks_per_worker > 1:
        return "ranks that compute a worker together take turns together; use serial"
    if settings.algorithm.is_data_parallel:
        return "algorithm=ddp has one instance per rank; use serial"
    if pool.offload.resident is not None:
        return "instances that swap take turns; use serial"
    if settings.batching.switch_n == "auto":
        return "batching.switch_n=auto times micro-batches, which must come in turn; use serial"
    if concurrency is Concurrency.streams and device.type != "cuda":
        return "a rank computes on a CPU, which has no streams; use threads, serial or auto"
    if concurrency is Concurrency.threads and device.type != "cpu":
        return "a rank computes on a GPU; use streams, serial or auto"
    if device.type == "cpu" and _draws_random_numbers(pool.slots[0]):
        return "the model draws random numbers, of which a CPU has one source; set its dropout to 0, or use serial"
    return None


def _draws_random_numbers(slot: ComputeSlot) -> bool:
    batch = slot.objective.trial_batch(1, slot.flat_model.device)
    before = torch.get_rng_state()
    with torch.no_grad(), slot.flat_model.autocast():
        slot.objective.loss(slot.flat_model.module, batch)
    return not torch.equal(before, torch.get_rng_state())


def _measure(pool: LocalPool, slots: Sequence[ComputeSlot], layout: Layout) -> list[float]:
    """Seconds of a few updates of every instance, in turn and concurrently; leaves trainers as they were."""
    settings, trainers = pool.settings, list(pool.trainers.values())
    plan = replace(plan_round(settings, PlanInputs(layout), None, PoolReport()), updates=MEASURED_UPDATES)
    fastest = [math.inf, math.inf]
    for repetition in range(1 + MEASUREMENTS):
        for is_concurrent in (False, True):
            phase = InnerPhase(replace(plan, is_concurrent=is_concurrent), settings)
            seconds = sum(result.seconds for result in phase.run(trainers, slots).values())
            if repetition:  # the first warms up
                fastest[is_concurrent] = min(fastest[is_concurrent], seconds)
    for trainer in trainers:
        for worker in trainer.workers:
            worker.weights.copy_(trainer.anchor)
            worker.reset_optimizer()
    return fastest
