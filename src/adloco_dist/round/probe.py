"""How many sequences this rank's device takes in one pass, found out with the real model and optimizers."""

from collections.abc import Sequence

import numpy as np
import psutil
import torch

from adloco_dist.config import Concurrency, OuterState, Settings
from adloco_dist.data.batch import Batch
from adloco_dist.data.tokens import padded
from adloco_dist.pool.capacity import PeakBytes, free_device_memory, is_out_of_memory, largest_fitting, state_vectors
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.lane import Lane
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.gradient import accumulate_gradient


def probe_capacity(
    lanes: Sequence[Lane], trainers: Sequence[Trainer], settings: Settings, most: int, sharers: int,
    reserved_bytes: int = 0,
) -> int | None:  # fmt: skip
    """Sequences per pass that fit beside the rank's share of the pool; None: any batch up to `most` does.

    On a GPU by trying; on a CPU, which would swap or be killed, by counting the bytes of small passes. Leaves the
    gradients zero and trainers as they were. Every lane may be in the middle of a pass at one time.

    Args:
        most: the largest local batch that any of the trainers can ask for.
        sharers: ranks between which the device's free memory is divided.
        reserved_bytes: of a GPU's memory, for what is yet to come.

    Returns:
        0 or less where not even one sequence fits.
    """
    if settings.batching.capacity is not None:
        return settings.batching.capacity
    free_device_memory()
    flat_model = lanes[0].flat_model
    flat_model.point_at(trainers[0].workers[0].weights.to(flat_model.device))
    if flat_model.device.type == "cuda":
        capacity = _by_trying(lanes[0], settings, most * len(lanes), sharers, reserved_bytes) // len(lanes)
    else:
        capacity = _by_counting(flat_model, trainers, settings, sharers, len(lanes))
    flat_model.gradient.zero_()
    return None if capacity >= most else capacity


def count_resident(
    lane: Lane, settings: Settings, num_trainers: int, num_workers: int, sharers: int, reserved_bytes: int = 0
) -> int | None:
    """How many of a rank's instances stay on its GPU, counted before there are any; None: all.

    As many as leave room for a pass of one sequence, and for `reserved_bytes`.
    """
    flat_model, instances = lane.flat_model, settings.instances
    if instances.resident is not None:
        return instances.resident if instances.resident < num_workers else None
    at_once = instances.concurrency in (Concurrency.streams, Concurrency.threads)
    if flat_model.device.type != "cuda" or at_once or num_workers < 2:
        return None
    vectors, vector_bytes = state_vectors(settings, num_trainers, num_workers), flat_model.gradient.nbytes
    per_worker = (vectors["weights"] + vectors["inner moments"]) * vector_bytes // num_workers
    taken = pass_bytes(flat_model, settings, 1)
    if settings.pool.outer_state is OuterState.device:
        taken += (vectors["anchors"] + vectors["outer momentum"]) * vector_bytes
    free_device_memory()
    free, _ = torch.cuda.mem_get_info(flat_model.device)
    left = settings.batching.padding_fraction * (free / sharers - reserved_bytes) - taken
    return None if left >= num_workers * per_worker else max(1, int(left // per_worker))


def _by_trying(lane: Lane, settings: Settings, most: int, sharers: int, reserved_bytes: int) -> int:
    """Passes of what trains, under a limit of padding_fraction of the free memory, by bisection.

    What the pool holds is allocated already, moments included, and a fused optimizer step needs nothing more.
    """
    flat_model, device = lane.flat_model, lane.flat_model.device
    free, total = torch.cuda.mem_get_info(device)
    room = free / sharers + torch.cuda.memory_reserved(device) - reserved_bytes
    usable = settings.batching.padding_fraction * room
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, usable / total)), device)

    def fits(batch: int) -> bool:
        try:
            sequences = trial_batch(settings, batch, device)
            accumulate_gradient(flat_model, lane.module, sequences, None, losses=lane.losses)
            torch.cuda.synchronize(device)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_device_memory()
        return False

    try:
        return largest_fitting(fits, most)
    finally:
        free_device_memory()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _by_counting(
    flat_model: FlatModel, trainers: Sequence[Trainer], settings: Settings, sharers: int, num_lanes: int
) -> int:
    """Bytes of passes of one and of two sequences give those of any number: they grow in proportion."""
    one, two = (pass_bytes(flat_model, settings, batch) for batch in (1, 2))
    memory = settings.cluster.memory_bytes
    vectors = state_vectors(settings, len(trainers), sum(len(trainer.workers) for trainer in trainers), num_lanes)
    if memory is None:  # what the pool holds is no longer available; the copy for a checkpoint is made later
        memory, held = psutil.virtual_memory().available // sharers, vectors["checkpoint"]
    else:
        held = sum(vectors.values())
    left = memory - held * flat_model.gradient.nbytes
    per_sequence = max(1, two - one)
    left_per_lane = settings.batching.padding_fraction * left / num_lanes
    return int((left_per_lane - (one - per_sequence)) // per_sequence)


def pass_bytes(flat_model: FlatModel, settings: Settings, batch: int) -> int:
    """What a pass of `batch` sequences takes beside weights and gradients, at its peak."""
    tokens = trial_batch(settings, batch, flat_model.device)
    with PeakBytes([flat_model.weights, flat_model.payload]) as counter:
        accumulate_gradient(flat_model, flat_model.module, tokens, None)
    return counter.peak


def trial_batch(settings: Settings, size: int, device: torch.device) -> Batch:
    """Sequences of full length, as large as any that training can meet."""
    length = settings.data.sequence_length
    if settings.data.is_labelled:
        labels = np.zeros(size, dtype=np.int64)
        return padded([np.zeros(length, dtype=np.uint16)] * size, 0, labels).to(device)
    return Batch.packed(torch.zeros(size, length + 1, dtype=torch.int64, device=device))
