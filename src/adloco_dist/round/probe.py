"""How many sequences this rank's device takes in one pass, found out with the real model and optimizers."""

from collections.abc import Sequence

import psutil
import torch

from adloco_dist.config import Settings, SettingsError
from adloco_dist.pool.capacity import PeakBytes, free_device_memory, is_out_of_memory, largest_fitting, state_vectors
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.gradient import accumulate_gradient


def probe_capacity(
    flat_model: FlatModel, trainers: Sequence[Trainer], settings: Settings, most: int, sharers: int
) -> int | None:
    """Sequences per pass that fit beside the rank's share of the pool; None: any batch up to `most` does.

    On a GPU by trying; on a CPU, which would swap or be killed, by counting the bytes of small passes. Leaves
    trainers as they were.

    Args:
        most: the largest local batch that any of the trainers can ask for.
        sharers: ranks between which the device's free memory is divided.

    Raises:
        SettingsError: not even one sequence fits.
    """
    if settings.batching.capacity is not None:
        return settings.batching.capacity
    is_cuda = flat_model.device.type == "cuda"
    flat_model.point_at(trainers[0].workers[0].weights)
    if is_cuda:
        capacity = _by_trying(flat_model, trainers, settings, most, sharers)
    else:
        capacity = _by_counting(flat_model, trainers, settings, sharers)
    flat_model.gradient.zero_()
    if capacity < 1:
        length = settings.data.sequence_length
        remedy = "a smaller model" if is_cuda else "a larger cluster.memory_bytes"
        raise SettingsError(
            f"data.sequence_length={length}: a pass of one sequence does not fit into memory beside the pool's "
            f"weights; use shorter sequences, fewer workers per rank, or {remedy}"
        )
    return None if capacity >= most else capacity


def _by_trying(flat_model: FlatModel, trainers: Sequence[Trainer], settings: Settings, most: int, sharers: int) -> int:
    """Passes and optimizer steps under a limit of padding_fraction of the free memory, by bisection."""
    device = flat_model.device
    free, total = torch.cuda.mem_get_info(device)
    usable = settings.batching.padding_fraction * (free / sharers + torch.cuda.memory_reserved(device))
    torch.cuda.set_per_process_memory_fraction(min(1.0, usable / total), device)
    workers = [worker for trainer in trainers for worker in trainer.workers]
    outer_momentum = len(trainers) * (settings.outer.momentum > 0) * (trainers[0].anchor.device == device)

    def fits(batch: int) -> bool:
        try:
            ballast = flat_model.gradient.new_empty(outer_momentum * flat_model.num_elements)
            for worker in workers:  # their moments stay allocated, as in training
                worker.optimizer.step()
            tokens = _tokens(flat_model, settings, batch)
            accumulate_gradient(flat_model, flat_model.module, tokens, None)
            workers[0].optimizer.step()
            torch.cuda.synchronize(device)
            del ballast  # stood for the outer momentum, which appears with the first outer step
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_device_memory()
        return False

    try:
        return largest_fitting(fits, most)
    finally:
        for trainer in trainers:
            for worker in trainer.workers:
                worker.weights.copy_(trainer.anchor)
                worker.reset_optimizer()
        free_device_memory()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _by_counting(flat_model: FlatModel, trainers: Sequence[Trainer], settings: Settings, sharers: int) -> int:
    """Bytes of passes of one and of two sequences give those of any number: they grow in proportion."""
    one, two = (_pass_bytes(flat_model, settings, batch) for batch in (1, 2))
    vectors = state_vectors(settings, len(trainers), sum(len(trainer.workers) for trainer in trainers))
    memory = settings.cluster.memory_bytes
    if memory is None:  # what exists already is no longer available
        memory = psutil.virtual_memory().available // sharers
        vectors = {kind: count for kind, count in vectors.items() if kind in ("inner moments", "outer momentum")}
    left = memory - sum(vectors.values()) * flat_model.gradient.nbytes
    per_sequence = max(1, two - one)
    return int((settings.batching.padding_fraction * left - (one - per_sequence)) // per_sequence)


def _pass_bytes(flat_model: FlatModel, settings: Settings, batch: int) -> int:
    tokens = _tokens(flat_model, settings, batch)
    with PeakBytes([flat_model.weights, flat_model.payload]) as counter:
        accumulate_gradient(flat_model, flat_model.module, tokens, None)
    return counter.peak


def _tokens(flat_model: FlatModel, settings: Settings, batch: int) -> torch.Tensor:
    return torch.zeros(batch, settings.data.sequence_length + 1, dtype=torch.int64, device=flat_model.device)
