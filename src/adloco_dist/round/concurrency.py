"""Whether a rank's instances have their turns one after the other or at once: what its device can, what is faster."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Algorithm, Concurrency, Estimator, Settings, SettingsError
from adloco_dist.data.batch import Batch
from adloco_dist.data.streams import RowStreams
from adloco_dist.data.tokens import Store
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.plan import PoolReport, Premises
from adloco_dist.decisions.planning import plan_round
from adloco_dist.losses import losses
from adloco_dist.pool.capacity import is_out_of_memory
from adloco_dist.pool.lane import Lane, further_lane
from adloco_dist.pool.residence import Residence
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.probe import trial_batch

MEASURED_UPDATES = 3
MEASUREMENTS = 3
"""Of each way, in turn; the fastest counts."""


def find_lanes(
    first: Lane, residence: Residence, trainers: Sequence[Trainer], layout: Layout, store: Store | RowStreams,
    settings: Settings, runtime: Runtime,
) -> tuple[list[Lane], bool]:  # fmt: skip
    """The lanes of this rank, and whether all ranks let their instances have their turns at once.

    Collective. With instances.concurrency=auto both ways are measured with real updates, which are undone.

    Raises:
        SettingsError: on all ranks, where a device or the model cannot do what is asked.
    """
    concurrency = settings.instances.concurrency
    if concurrency is Concurrency.serial:
        return [first], False
    obstacle = _obstacle(first, residence, settings)
    num_workers = sum(len(trainer.workers) for trainer in trainers)
    at_once = num_workers if first.flat_model.device.type == "cuda" else min(num_workers, runtime.threads)
    lanes = [first]
    try:
        lanes += [further_lane(first, settings) for _ in range(0 if obstacle else at_once - 1)]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        obstacle = f"there is no memory for the gradients of {at_once} instances at once; use serial"
    if concurrency is not Concurrency.auto:
        told = SettingsError(f"instances.concurrency={concurrency.name}: {obstacle}") if obstacle else None
        runtime.control.agree(told)
        return lanes, True
    seconds = {"in_turn": 0.0, "at_once": 0.0}
    if not obstacle:
        seconds = _measure(lanes, trainers, layout, store, settings)
    replies = runtime.control.exchange({"obstacle": bool(obstacle), **seconds})
    slowest = {way: max(reply[way] for reply in replies) for way in seconds}
    if any(reply["obstacle"] for reply in replies) or slowest["at_once"] >= slowest["in_turn"]:
        return [first], False
    return lanes, True


def _obstacle(lane: Lane, residence: Residence, settings: Settings) -> str | None:
    """Why instances cannot have their turns at once here; None if they can."""
    concurrency, device = settings.instances.concurrency, lane.flat_model.device
    if settings.algorithm.name is Algorithm.ddp:
        return "algorithm=ddp has one instance per rank; use serial"
    if residence.resident is not None:
        return "instances that swap take turns; use serial"
    estimator = settings.batching.estimator
    if settings.measures_gradients and estimator is not Estimator.sketch:
        return f"batching.estimator={estimator.name} sees one instance at a time; use sketch, or serial"
    if settings.switch.n == "auto":
        return "switch.n=auto times passes, which must come in turn; use serial"
    if concurrency is Concurrency.streams and device.type != "cuda":
        return "a rank computes on a CPU, which has no streams; use threads, serial or auto"
    if concurrency is Concurrency.threads and device.type != "cpu":
        return "a rank computes on a GPU; use streams, serial or auto"
    if device.type == "cpu" and _draws_random_numbers(lane, trial_batch(settings, 1, lane.flat_model.device)):
        return "the model draws random numbers, of which a CPU has one source; set its dropout to 0, or use serial"
    return None


def _draws_random_numbers(lane: Lane, batch: Batch) -> bool:
    before = torch.get_rng_state()
    with torch.no_grad():
        losses(lane.flat_model.module, batch)
    return not torch.equal(before, torch.get_rng_state())


def _measure(
    lanes: Sequence[Lane], trainers: Sequence[Trainer], layout: Layout, store: Store | RowStreams, settings: Settings
) -> dict[str, float]:
    """Seconds of a few updates of every instance, in turn and at once; leaves trainers as they were."""
    plan = replace(plan_round(settings, Premises(layout), None, PoolReport()), updates=MEASURED_UPDATES)
    seconds: dict[str, list[float]] = {"in_turn": [], "at_once": []}
    for repetition in range(1 + MEASUREMENTS):
        for way, is_concurrent in (("in_turn", False), ("at_once", True)):
            phase = InnerPhase(replace(plan, is_concurrent=is_concurrent), settings, store)
            results = phase.run(trainers, lanes)
            if repetition:  # the first warms up
                seconds[way].append(sum(result.seconds for result in results.values()))
    for trainer in trainers:
        for worker in trainer.workers:
            worker.weights.copy_(trainer.anchor)
            worker.reset_optimizer()
    return {way: min(taken) for way, taken in seconds.items()}
