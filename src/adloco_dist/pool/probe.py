"""How many sequences this rank's device takes in one micro-batch, found out with the real model and optimizers."""

import math
from collections.abc import Sequence

import psutil
import torch

from adloco_dist.config import Concurrency, OuterState, Settings
from adloco_dist.pool.capacity import PeakBytes, free_device_memory, is_out_of_memory, max_fitting, state_vectors
from adloco_dist.pool.gradient import accumulate_gradient
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer


def probe_capacity(
    slots: Sequence[ComputeSlot], trainers: Sequence[Trainer], settings: Settings, maximum: int, sharers: int,
    reserved_bytes: int = 0,
) -> int | None:  # fmt: skip
    """Sequences per micro-batch that fit beside the rank's share of the pool; None: any batch up to `maximum` does.

    On a GPU by trying; on a CPU, which would swap or be killed, by counting the bytes of small micro-batches. Leaves
    the gradients zero and trainers as they were. Every slot may be in the middle of a micro-batch at one time.

    Args:
        maximum: maximum local batch that any of the trainers can ask for.
        sharers: ranks between which the device's free memory is divided.
        reserved_bytes: memory of a GPU that is kept free for what is yet to come.

    Returns:
        0 where not even one sequence fits.
    """
    if settings.batching.capacity is not None:
        return settings.batching.capacity
    free_device_memory()
    flat_model = slots[0].flat_model
    flat_model.point_at(trainers[0].workers[0].weights.to(flat_model.device))
    shards = flat_model.shards
    if shards.ranks:  # who must agree, and would wait for one whose micro-batch did not fit
        most = math.ceil(maximum / len(shards.ranks))
        capacity = shards.smallest(_by_counting(slots, trainers, settings, most, sharers)) * len(shards.ranks)
    elif flat_model.device.type == "cuda":
        capacity = _by_trying(slots[0], settings, maximum * len(slots), sharers, reserved_bytes) // len(slots)
    else:
        capacity = _by_counting(slots, trainers, settings, maximum, sharers)
    flat_model.gradient.zero_()
    return None if capacity >= maximum else capacity


def count_resident(
    slot: ComputeSlot, settings: Settings, num_trainers: int, num_workers: int, sharers: int, reserved_bytes: int = 0
) -> int | None:
    """How many of a rank's instances stay on its GPU, counted before there are any; None: all.

    They leave room for a micro-batch of one sequence, and for `reserved_bytes`.
    """
    flat_model, instances = slot.flat_model, settings.instances
    if instances.resident is not None:
        return instances.resident if instances.resident < num_workers else None
    concurrent = instances.concurrency in (Concurrency.streams, Concurrency.threads)
    if flat_model.device.type != "cuda" or concurrent or num_workers < 2:
        return None
    vectors, vector_bytes = state_vectors(settings, num_trainers, num_workers), flat_model.gradient.nbytes
    per_worker = (vectors["weights"] + vectors["inner moments"]) * vector_bytes // num_workers
    taken = micro_batch_bytes(slot, 1)
    if settings.pool.outer_state is OuterState.device:
        taken += vectors["outer state"] * vector_bytes
    free_device_memory()
    free, _ = torch.cuda.mem_get_info(flat_model.device)
    left = settings.batching.padding_fraction * (free / sharers - reserved_bytes) - taken
    return None if left >= num_workers * per_worker else max(1, int(left // per_worker))


def _by_trying(slot: ComputeSlot, settings: Settings, maximum: int, sharers: int, reserved_bytes: int) -> int:
    """Find the capacity by bisection, with real micro-batches, under a limit of padding_fraction of the free memory.

    What the pool holds is allocated already, moments included, and a fused optimizer step needs nothing more.
    """
    flat_model, device = slot.flat_model, slot.flat_model.device
    free, total = torch.cuda.mem_get_info(device)
    room = free / sharers + torch.cuda.memory_reserved(device) - reserved_bytes
    usable = settings.batching.padding_fraction * room
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, usable / total)), device)

    def fits(batch: int) -> bool:
        try:
            accumulate_gradient(flat_model, slot.objective, slot.objective.trial_batch(batch, device), None)
            torch.cuda.synchronize(device)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_device_memory()
        return False

    try:
        return max_fitting(fits, maximum)
    finally:
        free_device_memory()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _by_counting(
    slots: Sequence[ComputeSlot], trainers: Sequence[Trainer], settings: Settings, maximum: int, sharers: int
) -> int:
    """Find the capacity from the bytes of micro-batches of one and of two sequences.

    More take no more each than two do: where what grows with them is largest, what does not grow is the smaller part.
    The difference between one and two would be too little: with a large vocabulary both have their peak where its
    gradients are, and many have it where their logits are.
    """
    counted = [micro_batch_bytes(slots[0], batch) for batch in range(1, min(maximum, 2) + 1)]
    memory, device = settings.cluster.memory_bytes, slots[0].flat_model.device
    vectors = state_vectors(settings, len(trainers), sum(len(trainer.workers) for trainer in trainers), len(slots))
    if device.type == "cuda":
        memory, held = torch.cuda.mem_get_info(device)[0] // sharers, 0
    elif memory is None:  # what the pool holds is no longer available; the copy for a checkpoint is made later
        memory, held = psutil.virtual_memory().available // sharers, vectors["checkpoint"]
    else:
        held = sum(vectors.values())
    left = memory - held * slots[0].flat_model.gradient.nbytes
    left_per_slot = settings.batching.padding_fraction * left / len(slots)
    return 0 if left_per_slot < counted[0] else max(1, int(left_per_slot * len(counted) // counted[-1]))


def micro_batch_bytes(slot: ComputeSlot, num_sequences: int) -> int:
    """Count what a micro-batch of so many sequences on this rank takes beside weights and gradients, at its peak."""
    flat_model = slot.flat_model
    batch = slot.objective.trial_batch(num_sequences * (len(flat_model.shards.ranks) or 1), flat_model.device)
    with PeakBytes([flat_model.weights, flat_model.payload]) as counter:
        accumulate_gradient(flat_model, slot.objective, batch, None)
    return counter.peak
