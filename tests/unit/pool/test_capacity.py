"""What a device takes: the search for it, the bytes of a pass, and the probe that leaves trainers as they were."""

import math
from dataclasses import replace

import pytest
import torch

from adloco_dist.config import Settings
from adloco_dist.pool.capacity import (
    PeakBytes,
    is_out_of_memory,
    max_fitting,
    micro_batch_bytes,
    probe_capacity,
    state_vectors,
)
from adloco_dist.pool.flat_model import FlatModel
from helpers.lone import lone_trainer
from helpers.support import FOUR_TRAINERS, small_module, small_objective, small_settings, small_store

CPU = torch.device("cpu")
MANY = 10**9


def probed(settings: Settings, maximum: int = MANY, num_workers: int = 2) -> int | None:
    objective = small_objective(settings)
    trainer, slot = lone_trainer(settings, objective, small_module(settings), small_store(), range(num_workers))
    before = trainer.anchor.clone()
    capacity = probe_capacity([slot], [trainer], settings, maximum, sharers=1)
    for worker in trainer.workers:
        assert torch.equal(worker.weights, before)
        assert not any(vector.any() for vector in worker.vectors()[1:]), "moments"
    assert not slot.flat_model.gradient.any()
    return capacity


def counted(settings: Settings, num_sequences: int) -> int:
    """What a micro-batch takes."""
    _, slot = lone_trainer(settings, small_objective(settings), small_module(settings), small_store())
    return micro_batch_bytes(slot, num_sequences)


def probed_beside_pool(settings: Settings, num_bytes: int) -> int | None:
    """The capacity where micro-batches have so much memory beside what two workers hold."""
    flat_model = FlatModel(small_module(settings), CPU, settings.precision)
    vectors = state_vectors(settings, num_trainers=1, num_workers=2, matrix_share=flat_model.matrix_share)
    held = math.ceil(sum(vectors.values()) * flat_model.gradient.nbytes)
    cluster = replace(settings.cluster, memory_bytes=held + num_bytes)
    return probed(replace(settings, cluster=cluster, batching=replace(settings.batching, padding_fraction=1.0)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("span", ["null", "0.05"])
@pytest.mark.parametrize("inner", ["adamw", "muon", "sgd"])
def test_all_vectors_of_a_trainer_are_counted(momentum: float, span: str, inner: str) -> None:
    overrides = (f"outer.momentum={momentum}", f"outer.average_span={span}", f"inner={inner}")
    settings = small_settings(*FOUR_TRAINERS, *overrides)
    trainer, _ = lone_trainer(settings, small_objective(settings), small_module(settings), small_store(), range(2))
    share = trainer.flat_model.matrix_share
    counted = state_vectors(settings, num_trainers=1, num_workers=2, matrix_share=share)
    kept = sum(vector.numel() for worker in trainer.workers for vector in worker.vectors())
    assert counted["outer state"] == len(trainer.state())
    held, saved = ((counted[kind] * trainer.anchor.numel()) for kind in ("inner moments", "checkpoint"))
    held += counted["weights"] * trainer.anchor.numel()
    outer = sum(map(torch.numel, trainer.state().values()))
    if inner == "muon":  # gaps between aligned matrices have no moments
        assert (held, saved) == pytest.approx((kept, kept + outer), rel=0.01)
    else:
        assert (held, saved) == (kept, kept + outer)


def test_doubling_and_bisection_find_the_largest_that_fits() -> None:
    for largest in range(40):
        for maximum in (1, 7, 16, 33):
            tried: list[int] = []

            def fits(count: int, largest: int = largest, maximum: int = maximum, tried: list[int] = tried) -> bool:
                assert 1 <= count <= maximum
                tried.append(count)
                return count <= largest

            assert max_fitting(fits, maximum) == min(largest, maximum)
            assert len(tried) <= 2 * maximum.bit_length() + 1


def test_peak_bytes_counts_what_is_alive_at_one_time() -> None:
    weights = torch.ones(1000, dtype=torch.float32)
    with PeakBytes([weights]) as counter:
        first = weights * 2
        second = first + weights
        del first
        weights.add_(1)
        second[:10].mul_(3)
        third = second * 2
        del second, third
        torch.ones(100)
    assert counter.peak == 8000


def test_on_a_cpu_the_memory_budget_decides() -> None:
    """A doubled budget holds twice as many sequences, once the pool's own vectors are paid for."""
    settings = small_settings(*FOUR_TRAINERS, "batching.padding_fraction=1")
    vector_bytes = FlatModel(small_module(settings), CPU, settings.precision).gradient.nbytes
    kept = 2 * 3 + 2  # two workers with two moments each, anchor, its momentum
    state = (kept + 1 + kept) * vector_bytes  # and the gradient, and the copy for a checkpoint

    def capacity(budget: int) -> int | None:
        return probed(small_settings(*FOUR_TRAINERS, "batching.padding_fraction=1", f"cluster.memory_bytes={budget}"))

    first, second, third = (capacity(state + extra) for extra in (8_000_000, 16_000_000, 24_000_000))
    assert first
    assert second
    assert third
    assert first > 10
    assert abs((third - second) - (second - first)) <= 1
    half = probed(
        small_settings(*FOUR_TRAINERS, "batching.padding_fraction=0.5", f"cluster.memory_bytes={state + 16_000_000}")
    )
    assert half
    assert abs(half - first) <= 1


@pytest.mark.parametrize("vocab_size", [23, 8000])
def test_what_was_counted_fits(vocab_size: int) -> None:
    """Also where one and two sequences take most memory for the vocabulary's gradients, and many for their logits."""
    settings = small_settings(*FOUR_TRAINERS, f"+model.overrides.vocab_size={vocab_size}")
    two, many = counted(settings, 2), counted(settings, 20)
    assert probed_beside_pool(settings, many) in (19, 20)
    assert many / 20 <= two / 2, "no more each than two take"


def test_memory_for_one_sequence_and_not_for_two() -> None:
    settings = small_settings(*FOUR_TRAINERS)
    one = counted(settings, 1)
    assert [probed_beside_pool(settings, extra) for extra in (one - 1, one)] == [0, 1]


def test_any_batch_that_a_trainer_can_ask_for_needs_no_limit() -> None:
    assert probed(small_settings(), maximum=10) is None
    assert probed(small_settings(*FOUR_TRAINERS, "batching.capacity=3")) == 3


def test_no_room_for_one_sequence() -> None:
    capacity = probed(small_settings(*FOUR_TRAINERS, "cluster.memory_bytes=1000"))
    assert capacity is not None
    assert capacity < 1


def test_available_memory_is_the_budget_by_default() -> None:
    capacity = probed(small_settings())
    assert capacity is not None
    assert capacity > 1000


def test_a_cpu_that_cannot_allocate_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("size mismatch"))


@pytest.mark.parametrize(
    "detail",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
        "CUDA driver error: out of memory",
    ],
)
def test_libraries_of_a_gpu_run_out_of_memory_in_words_of_their_own(detail: str) -> None:
    assert is_out_of_memory(RuntimeError(detail))
