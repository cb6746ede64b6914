"""Workers that several ranks hold together compute what workers of one rank do."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.profiler import profile

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.pool.sharding import blocks_of, shard_module
from helpers.processes import run_ranks
from helpers.sharded import ROWS, assert_equal, run_whole, whole
from helpers.support import LLAMA, small_module, small_settings

MERGING = (
    "pool.trainers=3", "pool.workers_per_trainer=1", "merge=worst_with_worst", "merge.every_rounds=2",
    "batching.request=norm_test", "budget=6rounds",
)  # fmt: skip
ONE = ("pool.trainers=1", "pool.workers_per_trainer=2")
CASES = {
    "momentum": (*ONE, "outer=nesterov"),
    "merges and growing batches": MERGING,
    "odd batches in micro-batches": (*ONE, "batching.local_batch=3", "batching.capacity=4"),
    "a sequence for several ranks": (*ONE, "batching.local_batch=1"),
    "clipped gradients": (*ONE, "inner.clip_norm=0.05"),
    "outer state in CPU memory": (*ONE, "pool.outer_state=cpu", "outer.average_span=0.1"),
    "workers that take turns": ("pool.trainers=2", "pool.workers_per_trainer=2", "instances.resident=1"),
    "fragments that travel during updates": (
        *ONE, "wire.fragments=2", "wire.delay_updates=1", "algorithm.updates_per_round=4"
    ),
    "plain SGD": (*ONE, "inner=sgd"),
    "Muon": (*ONE, "inner=muon", "inner.lr=5e-3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_hold_what_one_does(case: str, tmp_path: Path) -> None:
    reference = run_whole(1, 2, tmp_path / "one", *CASES[case])
    assert_equal(run_whole(2, 2, tmp_path / "two", *CASES[case]), reference)


def test_four_ranks_hold_what_one_does(tmp_path: Path) -> None:
    reference = run_whole(1, 1, tmp_path / "one", *MERGING)
    assert len({rank["total_batch"] for rank in reference[0]["records"] if rank["round"]}) > 1, "batches grew"
    assert_equal(run_whole(4, 1, tmp_path / "four", *MERGING), reference)


def gradients_of(runtime: Runtime) -> tuple[list[str], list[npt.NDArray[np.float64]]]:
    """What added gradients of a model's largest parameter; and all gradients, whole."""
    module, tokens = small_module(small_settings(ROWS)), torch.arange(12)[None]
    shape = list(next(module.parameters()).shape)
    if runtime.of_seat is not None:
        shard_module(module, blocks_of(module), runtime.of_seat, runtime.device, in_bf16=False)
    with profile(record_shapes=True) as seen:
        module(tokens).logits.square().sum().backward()
    sums = [one.key for one in seen.key_averages(group_by_input_shape=True) if one.input_shapes[:2] == [shape, shape]]
    return sums, [whole(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]


def test_gradients_of_a_tied_weight_are_added_in_place() -> None:
    """A sum of its own would be as large as the vocabulary's gathered weights, at the time of most memory."""
    ((_, expected),) = run_ranks(gradients_of, [0])
    for sums, gradients in run_ranks(gradients_of, [0, 0], ranks_per_worker=2):
        assert "aten::add_" in sums
        assert "aten::add" not in sums
        for gradient, reference in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=1e-7)


def test_four_ranks_take_turns_to_orthogonalise(tmp_path: Path) -> None:
    """Two matrices of each shape: two of the ranks have none in their turn."""
    chosen = (*ONE, "inner=muon", "inner.lr=5e-3")
    assert_equal(run_whole(4, 1, tmp_path / "four", *chosen), run_whole(1, 1, tmp_path / "one", *chosen))


@pytest.mark.parametrize("size", [2, 4])
def test_matrices_of_heads_are_orthogonalised_by_ranks_that_have_parts_of_them(size: int, tmp_path: Path) -> None:
    """Of a Llama, whose heads have matrices of their own, fewer of keys than of queries; its norms compute in fp32."""
    chosen = (*ONE, "inner=muon", "inner.lr=5e-3", *LLAMA)
    parts = run_whole(size, 1, tmp_path / "parts", *chosen)
    assert_equal(parts, run_whole(1, 1, tmp_path / "one", *chosen), tolerance=1e-5)


@pytest.mark.parametrize("wire", ["int4", "sparse"])
def test_few_bits_bring_parts_about_as_far(wire: str, tmp_path: Path) -> None:
    chosen = (*ONE, f"wire={wire}", "outer=average", "budget=12rounds", "inner.lr=1e-2")
    whole, parts = (run_whole(size, 2, tmp_path / str(size), *chosen)[0]["records"] for size in (1, 2))
    assert parts[-1]["train_loss"] == pytest.approx(whole[-1]["train_loss"], rel=0.1)
    assert parts[-1]["train_loss"] < 0.98 * parts[1]["train_loss"]


DELAYED = (*MERGING, "wire.delay_updates=1")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_whole(1, 2, tmp_path_factory.mktemp("whole"), *DELAYED)


@pytest.mark.parametrize("looks", [4, 9])
def test_resumes_with_other_numbers_of_ranks(uninterrupted: list[dict[str, Any]], tmp_path: Path, looks: int) -> None:
    records, midway = [], []
    for size, seats, left in ((2, 2, looks), (1, 2, 5), (4, 1, 5), (2, 1, None)):
        ranks = run_whole(size, seats, tmp_path, *DELAYED, looks=left)
        assert {rank["stop"] == INTERRUPTED for rank in ranks} == {left is not None}
        records += ranks[0]["records"]
        midway += [done for rank in ranks for done in rank["updates_done"] if 0 < done < 3]
    assert midway, "in the middle of a round"
    ranks[0]["records"] = records
    assert_equal(ranks, uninterrupted, is_resumed=True)
