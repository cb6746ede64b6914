"""Batches that follow the gradients, on real ranks: hosting and capacity change nothing, estimators agree."""

import math
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from adloco_dist.data.tokens import TokenTable
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.round.estimators.choice import new_estimator
from adloco_dist.round.evaluate import Part, evaluate
from adloco_dist.round.inner import InnerPhase
from adloco_dist.run.journal import MetricsFile
from adloco_dist.run.records import read_trajectory
from adloco_dist.setup.placement import set_up_pool
from adloco_dist.testing.lone import lone_trainer
from adloco_dist.testing.processes import run_ranks
from helpers.support import (
    SEQUENCE_LENGTH,
    small_module,
    small_objective,
    small_settings,
    small_splits,
    train_small_pool,
)

ADAPTIVE = (
    "batching.request=norm_test", "batching.eta=0.7", "batching.span=0.3", "inner.lr=5e-3", "budget.rounds=6",
    "switch.batch_limit=5",
)  # fmt: skip
BATCH_COLUMNS = ("round", "trainer", "total_batch", "mode", "bound", "cursor", "tokens", "pool_tokens")


DERIVED = ("mean_squared_norm", "ip_squared_norm")


def batches(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: record.get(key) for key in BATCH_COLUMNS} for record in ranks[0]["records"]]


def assert_same_run(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert batches(mine) == batches(theirs)
    anchors = [
        {trainer: anchor for rank in run for trainer, anchor in rank["anchors"].items()} for run in (mine, theirs)
    ]
    for trainer, anchor in anchors[0].items():
        np.testing.assert_allclose(anchor, anchors[1][trainer], rtol=0, atol=1e-9)
    for own, other in zip(mine[0]["records"], theirs[0]["records"], strict=True):
        for name, value in (own.get("statistics") or {}).items():
            assert value == pytest.approx(other["statistics"][name], rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("estimator", ["sketch", "workers", "per_sequence"])
def test_adaptive_batches_do_not_depend_on_hosting(estimator: str) -> None:
    overrides = (
        *ADAPTIVE, "pool.trainers=2", "pool.workers_per_trainer=3", f"batching.estimator={estimator}",
        "batching.request=augmented_inner_product_test", "batching.theta=0.6", "batching.nu=0.8",
    )  # fmt: skip
    alone = run_ranks(train_small_pool, [0], *overrides)
    assert len({batch["total_batch"] for batch in batches(alone)}) > 2, "batches that never change prove nothing"
    for nodes in ([0, 0], [0, 1, 1, 1]):
        assert_same_run(alone, run_ranks(train_small_pool, nodes, *overrides, "pool.placement=spread"))


def train_with_own_capacity(runtime: Runtime, capacities: list[int], *overrides: str) -> dict[str, Any]:
    return train_small_pool(runtime, *overrides, f"batching.capacity={capacities[runtime.rank]}")


@pytest.mark.parametrize("mode", ["threshold", "accumulate"])
def test_ranks_of_unlike_capacity_do_the_same_as_alike_ones(mode: str) -> None:
    overrides = (
        *ADAPTIVE, "pool.trainers=1", "pool.workers_per_trainer=2", f"switch.mode={mode}", "switch.batch_limit=3",
        "batching.eta=0.4",
    )  # fmt: skip
    alike, unlike = (
        run_ranks(train_with_own_capacity, [0, 0], capacities, *overrides) for capacities in ([8, 8], [2, 3])
    )
    assert_same_run(alike, unlike)
    modes = {record.get("mode") for record in unlike[0]["records"]}
    assert "accumulated" in modes
    assert ("clipped" in modes) == (mode == "threshold")
    assert alike[0]["records"][-1]["passes"] < unlike[0]["records"][-1]["passes"]


def test_the_batch_limit_is_the_least_capacity_of_a_trainers_ranks() -> None:
    overrides = (*ADAPTIVE, "switch.batch_limit=null", "pool.trainers=2", "pool.workers_per_trainer=2")
    ranks = run_ranks(train_with_own_capacity, [0, 0, 1, 1], [7, 4, 9, 3], *overrides)
    limits = {(record["trainer"], record["batch_limit"]) for record in ranks[0]["records"] if record["round"]}
    assert limits == {(0, 4), (1, 3)}


def test_automatic_n_is_measured_and_recorded() -> None:
    overrides = (*ADAPTIVE, "pool.trainers=1", "pool.workers_per_trainer=2", "switch.n=auto", "switch.batch_limit=2",
                 "batching.eta=0.4")  # fmt: skip
    for record in run_ranks(train_small_pool, [0, 0], *overrides)[0]["records"][1:]:
        wanted = math.ceil(record["bounded_request"] / 2)
        if wanted <= 2:
            assert record["mode"] == "whole"
        elif record["round"] > 1:  # before, nothing was measured and n is the paper's
            assert record["switch_n"] in (1.0, wanted / 2)
            assert record["mode"] == ("accumulated" if record["switch_n"] == 1.0 else "clipped")


def test_training_goes_on_with_a_shard_smaller_than_the_batch() -> None:
    """120 sequences over two trainers: an update takes a whole epoch of a shard, and no sequence twice."""
    overrides = ("pool.trainers=2", "pool.workers_per_trainer=2", "batching.local_batch=100", "budget.rounds=3")
    ranks = run_ranks(train_small_pool, [0, 0], *overrides, "batching.request=norm_test")
    assert ranks[0]["stop"] == "budget.rounds=3 reached"
    for record in ranks[0]["records"]:
        if record["round"] == 1:
            assert (record["total_batch"], record["bound"]) == (60, "shard")
            assert "one epoch of the trainer's shard" in record["notes"][0]
        if record["round"]:
            assert record["total_batch"] <= 60
            assert record["statistics"]["trace"] > 0


@pytest.mark.parametrize("released_workers", ["join", "redistribute"])
def test_a_replay_takes_the_recorded_batches_and_merges(tmp_path: Path, released_workers: str) -> None:
    overrides = (*ADAPTIVE, "pool.trainers=3", "pool.workers_per_trainer=3", "merge=worst_with_worst",
                 "merge.every_rounds=2", "switch.batch_limit=2", "switch.mode=clip",
                 f"merge.released_workers={released_workers}")  # fmt: skip
    recorded = run_ranks(train_small_pool, [0], *overrides)
    metrics = MetricsFile(tmp_path)
    metrics.write(recorded[0]["records"])
    metrics.close(None)
    replayed = run_ranks(replay, [0, 0], str(tmp_path), *overrides, "merge.released_workers=retire", "merge=none")
    assert [record["round"] for record in recorded[0]["records"] if "merge" in record] == [3, 5]
    for mine, theirs in zip(recorded[0]["records"], replayed[0]["records"], strict=True):
        for key in ("round", "trainer", "workers", "total_batch", "cursor"):
            assert mine.get(key) == theirs.get(key)
        assert mine.get("train_loss") == pytest.approx(theirs.get("train_loss"), abs=1e-9)


def replay(runtime: Runtime, source: str, *overrides: str) -> dict[str, Any]:
    return train_small_pool(
        runtime, *overrides, "batching.request=replay", "batching.replay=x",
        trajectory=read_trajectory("batching.replay", source) if runtime.rank == 0 else None,
    )  # fmt: skip


def measured(runtime: Runtime, estimator: str, batch: int) -> dict[str, Any]:
    """Statistics of one round of a trainer with 4 workers, and the largest number of bytes a rank sent for them."""
    settings = small_settings(
        "pool.trainers=1", "pool.workers_per_trainer=4", f"batching.local_batch={batch}",
        "batching.request=inner_product_test", f"batching.estimator={estimator}", "algorithm.updates_per_round=1",
    )  # fmt: skip
    layout = Layout.one_rank_per_worker({0: (0, 0, 1, 1)})
    pool = set_up_pool(settings, runtime, small_splits(), small_objective(settings), small_module(settings), layout)
    trainer = pool.trainers[0]
    pool.slots[0].sketch.renew(0)
    plan = plan_round(settings, PlanInputs(layout), None, PoolReport())
    InnerPhase(plan, settings, pool.estimators).run([trainer], pool.slots)
    done = pool.estimators[0].measure(trainer, layout, pool.groups.of(layout.ranks(0)))
    found = done.statistics
    statistics = found and {**vars(found), **{name: getattr(found, name) for name in DERIVED}}
    return {"statistics": statistics, "bytes": done.bytes_sent, "vector_bytes": pool.flat_model.gradient.nbytes}


def test_estimators_agree_on_what_they_can_all_see() -> None:
    """With one sequence per worker, every estimator sees the same four gradients."""
    sketch, workers, per_sequence = (
        run_ranks(measured, [0, 0], estimator, 1) for estimator in ("sketch", "workers", "per_sequence")
    )
    exact = per_sequence[0]["statistics"]
    for name, value in workers[0]["statistics"].items():
        if name in ("trace", "squared_norm", "mean_squared_norm"):
            assert value == pytest.approx(exact[name], rel=1e-6)
    # Full vectors are only averaged: the noise of the mean stays in the variance of inner products.
    assert workers[0]["statistics"]["ip_squared_norm"] == pytest.approx(exact["mean_squared_norm"], rel=1e-6)
    assert sketch[0]["statistics"]["trace"] == pytest.approx(exact["trace"], rel=0.1)
    assert sketch[0]["statistics"]["mean_squared_norm"] == pytest.approx(exact["mean_squared_norm"], rel=0.1)
    for run in (sketch, workers, per_sequence):
        assert run[1]["statistics"] is None, "only the lowest rank knows"
    rows, width = 2 * 1, 8 * (4093 + 1)  # with the size of its chunk
    assert sketch[1]["bytes"] == rows * width
    assert sketch[0]["bytes"] == 0, "the lowest rank receives"
    assert per_sequence[1]["bytes"] == 2 * (per_sequence[1]["vector_bytes"] + 8)


def test_statistics_are_those_of_chunks_cut_by_sequence_index() -> None:
    """7 sequences per worker in chunks of 3, 2 and 2; against their gradients one by one."""
    (first, _) = run_ranks(measured, [0, 0], "sketch", 7)
    (exact, _) = run_ranks(measured, [0, 0], "per_sequence", 7)
    for name in ("trace", "mean_squared_norm"):
        # Chunks and single sequences estimate the same trace from 12 and 28 gradients of the same batch.
        assert first["statistics"][name] == pytest.approx(exact["statistics"][name], rel=0.4)
    assert first["statistics"]["mean_squared_norm"] == pytest.approx(exact["statistics"]["mean_squared_norm"], rel=0.1)


def limit_memory(allowed_bytes: int) -> None:
    """Of this process, beside what it takes already."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed_bytes, resource.RLIM_INFINITY))


def table_of(num_sequences: int) -> TokenTable:
    """The training sequences of `small_splits`, so many of them."""
    table = small_splits(num_sequences).table
    assert isinstance(table, TokenTable)
    return table


def out_of_memory(runtime: Runtime, local_batch: int, allowed_bytes: int | None) -> dict[str, Any]:
    """A round whose updates need more memory in one pass than the process may have."""
    settings: Settings = small_settings(
        "pool.trainers=1", f"batching.local_batch={local_batch}", "algorithm.updates_per_round=2",
        "batching.request=norm_test",
    )  # fmt: skip
    objective, table = small_objective(settings), table_of(2 * local_batch)
    trainer, slot = lone_trainer(settings, objective, small_module(settings), table)
    slot.sketch.renew(0)
    estimator = new_estimator(settings)
    plan = plan_round(settings, PlanInputs(Layout.one_rank_per_worker({0: (0,)})), None, PoolReport())
    if allowed_bytes is not None:
        limit_memory(allowed_bytes)
    done = InnerPhase(plan, settings, {0: estimator}).run([trainer], [slot])[0]
    statistics = estimator.measure(trainer, plan.layout, None).statistics
    return {
        "weights": trainer.workers[0].weights.numpy().copy(),
        "capacity": slot.flat_model.capacity,
        "notes": done.notes,
        "loss": done.loss_sum,
        "trace": statistics.trace if statistics else None,
    }


def test_out_of_memory_repeats_the_update_in_smaller_passes() -> None:
    """Real memory: the process may take a tenth of what one pass needs."""
    batch = 8192
    (free,) = run_ranks(out_of_memory, [0], batch, None)
    (tight,) = run_ranks(out_of_memory, [0], batch, SEQUENCE_LENGTH * batch * 800)
    assert free["capacity"] is None
    assert free["notes"] == []
    assert tight["capacity"] is not None
    assert tight["capacity"] < batch
    assert "out of memory" in tight["notes"][0]
    np.testing.assert_allclose(tight["weights"], free["weights"], rtol=0, atol=1e-9)
    assert tight["loss"] == pytest.approx(free["loss"], abs=1e-12)
    assert tight["trace"] == pytest.approx(free["trace"], rel=1e-9)


def evaluated(runtime: Runtime, num_sequences: int, allowed_bytes: int | None) -> dict[str, Any]:
    """Everything in one pass, if memory allows."""
    settings = small_settings()
    objective, table = small_objective(settings), table_of(num_sequences)
    trainer, slot = lone_trainer(settings, objective, small_module(settings), table)
    if allowed_bytes is not None:
        limit_memory(allowed_bytes)
    return asdict(
        evaluate(slot.flat_model, objective, trainer.anchor, table, range(num_sequences), num_sequences, Part(0, 1))
    )


def test_an_evaluation_that_runs_out_of_memory_goes_on_in_smaller_passes() -> None:
    num_sequences = 8192
    (free,) = run_ranks(evaluated, [0], num_sequences, None)
    (tight,) = run_ranks(evaluated, [0], num_sequences, SEQUENCE_LENGTH * num_sequences * 400)
    assert tight["targets"] == free["targets"] == num_sequences * SEQUENCE_LENGTH
    assert tight["loss_sum"] == pytest.approx(free["loss_sum"], rel=1e-12)
