"""Batches that follow the gradients, on real ranks: hosting and capacity change nothing, sketches are right."""

import math
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from adloco_dist.data.tokens import TokenTable
from adloco_dist.messages import decode, encode
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import MeasureReport, RankReport, TrainerReport
from adloco_dist.pool.estimator import GradientEstimator, with_statistics
from adloco_dist.round.evaluate import evaluate
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.steps import measure
from adloco_dist.run.journal import MetricsFile
from adloco_dist.run.reading import read_trajectory
from adloco_dist.run.rows import TrainerRow
from adloco_dist.setup.placement import set_up_pool
from helpers.gradients import per_sequence_gradients
from helpers.lone import lone_trainer
from helpers.processes import run_ranks
from helpers.support import (
    FOUR_TRAINERS,
    SEQUENCE_LENGTH,
    small_module,
    small_objective,
    small_settings,
    small_splits,
    train_small_pool,
)

ADAPTIVE = (
    "batching.request=norm_test", "batching.eta=0.7", "batching.span=0.3", "inner.lr=5e-3", "budget=6rounds",
    "batching.capacity=5",
)  # fmt: skip
BATCH_COLUMNS = ("round", "trainer", "total_batch", "mode", "bound", "cursor", "tokens", "pool_tokens")


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


def test_adaptive_batches_do_not_depend_on_hosting() -> None:
    overrides = (
        *ADAPTIVE, "pool.trainers=2", "pool.workers_per_trainer=3",
        "batching.request=augmented_inner_product_test", "batching.theta=0.6", "batching.nu=0.8",
    )  # fmt: skip
    alone = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, *overrides)
    assert len({batch["total_batch"] for batch in batches(alone)}) > 2, "batches that never change prove nothing"
    for nodes in ([0, 0], [0, 1, 1, 1]):
        assert_same_run(alone, run_ranks(train_small_pool, nodes, *FOUR_TRAINERS, *overrides, "pool.placement=spread"))


def train_with_own_capacity(runtime: Runtime, capacities: list[int], *overrides: str) -> dict[str, Any]:
    return train_small_pool(runtime, *FOUR_TRAINERS, *overrides, f"batching.capacity={capacities[runtime.rank]}")


@pytest.mark.parametrize("n", [2, 1])
def test_ranks_of_unlike_capacity_do_the_same_as_alike_ones(n: int) -> None:
    overrides = (
        *ADAPTIVE, "pool.trainers=1", "pool.workers_per_trainer=2", f"batching.switch_n={n}", "batching.eta=0.4",
    )  # fmt: skip
    alike, unlike = (
        run_ranks(train_with_own_capacity, [0, 0], capacities, *overrides) for capacities in ([3, 3], [8, 3])
    )
    assert_same_run(alike, unlike)
    modes = {record.get("mode") for record in unlike[0]["records"]}
    assert "accumulated" in modes
    assert ("clipped" in modes) == (n == 2)


def test_the_batch_limit_is_the_least_capacity_of_a_trainers_ranks() -> None:
    overrides = (*ADAPTIVE, "pool.trainers=2", "pool.workers_per_trainer=2")
    ranks = run_ranks(train_with_own_capacity, [0, 0, 1, 1], [7, 4, 9, 3], *overrides)
    limits = {(record["trainer"], record["batch_limit"]) for record in ranks[0]["records"] if record["round"]}
    assert limits == {(0, 4), (1, 3)}


def test_automatic_n_is_measured_and_recorded() -> None:
    overrides = (
        *ADAPTIVE, "pool.trainers=1", "pool.workers_per_trainer=2", "batching.switch_n=auto", "batching.capacity=2",
        "batching.eta=0.4",
    )  # fmt: skip
    for record in run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *overrides)[0]["records"][1:]:
        wanted = math.ceil(record["bounded_request"] / 2)
        if wanted <= 2:
            assert record["mode"] == "whole"
        elif record["round"] > 1:  # before, nothing was measured and n is the paper's
            assert record["switch_n"] in (1.0, wanted / 2)
            assert record["mode"] == ("accumulated" if record["switch_n"] == 1.0 else "clipped")


def test_training_goes_on_with_a_shard_smaller_than_the_batch() -> None:
    """120 sequences over two trainers: an update takes a whole epoch of a shard, and no sequence twice."""
    overrides = ("pool.trainers=2", "pool.workers_per_trainer=2", "batching.local_batch=100", "budget=3rounds")
    ranks = run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *overrides, "batching.request=norm_test")
    assert ranks[0]["stop"] == "budget=3rounds reached"
    for record in ranks[0]["records"]:
        if record["round"] == 1:
            assert (record["total_batch"], record["bound"]) == (60, "shard")
            assert "one epoch of the trainer's shard" in record["notes"][0]
        if record["round"]:
            assert record["total_batch"] <= 60
            assert record["statistics"]["trace"] > 0


def test_a_replay_takes_the_recorded_batches_and_merges(tmp_path: Path) -> None:
    overrides = (*ADAPTIVE, "pool.trainers=3", "pool.workers_per_trainer=3", "merge=worst_with_worst",
                 "merge.every_rounds=2", "batching.capacity=2", "batching.switch_n=null")  # fmt: skip
    recorded = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, *overrides)
    metrics = MetricsFile(tmp_path)
    metrics.write([decode(TrainerRow, record) for record in recorded[0]["records"]])
    metrics.close(None)
    replayed = run_ranks(replay, [0, 0], str(tmp_path), *overrides, "merge=none")
    assert [record["round"] for record in recorded[0]["records"] if "merge" in record] == [3, 5]
    for mine, theirs in zip(recorded[0]["records"], replayed[0]["records"], strict=True):
        for key in ("round", "trainer", "workers", "total_batch", "cursor"):
            assert mine.get(key) == theirs.get(key)
        assert mine.get("train_loss") == pytest.approx(theirs.get("train_loss"), abs=1e-9)


def replay(runtime: Runtime, source: str, *overrides: str) -> dict[str, Any]:
    return train_small_pool(
        runtime, *FOUR_TRAINERS, *overrides, "batching.request=replay", "batching.replay=x",
        trajectory=read_trajectory("batching.replay", source) if runtime.rank == 0 else None,
    )  # fmt: skip


def measured(runtime: Runtime, batch: int) -> dict[str, Any]:
    """Statistics of one round of a trainer with 4 workers, exact ones, and the bytes that this rank sent."""
    settings = small_settings(
        *FOUR_TRAINERS,
        "pool.trainers=1", "pool.workers_per_trainer=4", f"batching.local_batch={batch}",
        "batching.request=inner_product_test", "algorithm.updates_per_round=1",
    )  # fmt: skip
    layout = Layout.one_rank_per_worker({0: (0, 0, 1, 1)})
    pool = set_up_pool(settings, runtime, small_splits(), small_objective(settings), small_module(settings), layout)
    trainer = pool.trainers[0]
    pool.flat_model.point_at(trainer.anchor)
    one_by_one = [
        per_sequence_gradients(pool.flat_model, pool.objective, trainer.cursor.batch(worker, 0, batch, [1] * 4))
        for worker in range(4)
    ]
    rows, sizes = (torch.cat(parts) for parts in zip(*one_by_one, strict=True))
    pool.flat_model.sketch.renew(0)
    plan = plan_round(settings, PlanInputs(layout), None, PoolReport())
    InnerPhase(plan, settings, pool.estimator).run([trainer], pool.slots)
    assert pool.estimator
    report = RankReport(runtime.rank)
    measure(pool, report)
    messages = runtime.control.exchange({"report": encode(report)})
    reports = [decode(RankReport, message["report"]) for message in messages]
    found = with_statistics(reports, is_plugin=False, is_streaming=False)
    assert not any(one.trainers[0].measure.sketches for one in found), "nobody needs them any more"
    return {
        "sketched": found[runtime.rank].trainers[0].measure.statistics,
        "exact": statistics_from_gram(rows @ rows.T, sizes[:, 0]),
        "bytes": report.trainers[0].measure.bytes_sent,
    }


def test_sketches_measure_what_exact_gradients_do() -> None:
    """With one sequence per worker, both see the same four gradients."""
    lowest, other = run_ranks(measured, [0, 0], 1)
    for name in ("trace", "mean_squared_norm"):
        assert getattr(lowest["sketched"], name) == pytest.approx(getattr(lowest["exact"], name), rel=0.1)
    assert other["sketched"] is None, "they stand in the report of the lowest rank"
    workers, width = 2, 8 * (4093 + 1)  # with the size of its chunk
    assert (lowest["bytes"], other["bytes"]) == (0, workers * (1 + width)), "rank 0 receives"


def test_statistics_are_those_of_chunks_cut_by_sequence_index() -> None:
    """7 sequences per worker in chunks of 3, 2 and 2; against their gradients one by one."""
    lowest, _ = run_ranks(measured, [0, 0], 7)
    # Chunks and single sequences estimate the same trace from 12 and 28 gradients of the same batch.
    assert lowest["sketched"].trace == pytest.approx(lowest["exact"].trace, rel=0.4)
    assert lowest["sketched"].mean_squared_norm == pytest.approx(lowest["exact"].mean_squared_norm, rel=0.1)


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
        *FOUR_TRAINERS,
        "pool.trainers=1", f"batching.local_batch={local_batch}", "algorithm.updates_per_round=2",
        "batching.request=norm_test",
    )  # fmt: skip
    objective, table = small_objective(settings), table_of(2 * local_batch)
    trainer, slot = lone_trainer(settings, objective, small_module(settings), table)
    slot.flat_model.sketch.renew(0)
    estimator = GradientEstimator()
    plan = plan_round(settings, PlanInputs(Layout.one_rank_per_worker({0: (0,)})), None, PoolReport())
    if allowed_bytes is not None:
        limit_memory(allowed_bytes)
    done = InnerPhase(plan, settings, estimator).run([trainer], [slot])[0]
    share = TrainerReport(1, measure=MeasureReport(estimator.take(trainer)))
    (found,) = with_statistics([RankReport(0, trainers={0: share})], is_plugin=False, is_streaming=False)
    statistics = found.trainers[0].measure.statistics
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
    settings = small_settings(*FOUR_TRAINERS)
    objective, table = small_objective(settings), table_of(num_sequences)
    trainer, slot = lone_trainer(settings, objective, small_module(settings), table)
    if allowed_bytes is not None:
        limit_memory(allowed_bytes)
    return asdict(evaluate(slot.flat_model, objective, trainer.anchor, table, range(num_sequences), num_sequences))


def test_an_evaluation_that_runs_out_of_memory_goes_on_in_smaller_passes() -> None:
    num_sequences = 8192
    (free,) = run_ranks(evaluated, [0], num_sequences, None)
    (tight,) = run_ranks(evaluated, [0], num_sequences, SEQUENCE_LENGTH * num_sequences * 400)
    assert tight["targets"] == free["targets"] == num_sequences * SEQUENCE_LENGTH
    assert tight["loss_sum"] == pytest.approx(free["loss_sum"], rel=1e-12)
