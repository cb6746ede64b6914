"""How pseudo-gradients travel, in the launcher: fragments, delays and formats on any placement, through merges."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.averaging.averager import FullPrecision
from adloco_dist.averaging.group import Group
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.round.local_pool import LocalPool
from adloco_dist.round.outer import complete, mix, mix_awaited, outer, start
from adloco_dist.testing.processes import run_ranks
from helpers.support import (
    held_anchors,
    new_trainer,
    small_settings,
    train_small_pool,
)

WORKERS = ("pool.trainers=2", "pool.workers_per_trainer=4", "algorithm.updates_per_round=6", "budget.rounds=3")
STREAMED = ("wire.fragments=2", "wire.delay_updates=2")


def run(nodes: list[int], *overrides: str) -> list[dict[str, Any]]:
    return run_ranks(train_small_pool, nodes, *WORKERS, *overrides)


RADIAL = ("outer.radial=true", "outer.outlier_deviations=0.5", "outer.outlier_rounds=2")


@pytest.mark.parametrize(
    "overrides",
    [("wire.fragments=3",), STREAMED, (*STREAMED, "instances.concurrency=threads"), RADIAL, (*RADIAL, *STREAMED)],
)
def test_placement_changes_nothing(overrides: tuple[str, ...]) -> None:
    alone = held_anchors(run([0], *overrides))
    for nodes in ([0, 0], [0, 0, 1, 1]):
        for trainer, anchor in held_anchors(run(nodes, *overrides)).items():
            np.testing.assert_allclose(anchor, alone[trainer], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 2e-4), ("int8", 5e-4), ("int4", 1e-2)])
def test_placement_changes_no_more_than_rounding_does(wire: str, tolerance: float) -> None:
    """Alone nothing travels. In one round a weight moves by about 3e-3; the rounded steps add up over three."""
    alone = held_anchors(run([0], f"wire={wire}"))
    for nodes in ([0, 0], [0, 0, 1, 1]):
        ranks = run(nodes, f"wire={wire}")
        for trainer, anchor in held_anchors(ranks).items():
            np.testing.assert_allclose(anchor, alone[trainer], rtol=0, atol=tolerance)
            assert not np.array_equal(anchor, alone[trainer])


@pytest.mark.parametrize("overrides", [STREAMED, ("wire=slow_link", "wire.fragments=2", "wire.delay_updates=1")])
def test_trainers_learn_and_merge_while_averages_travel(overrides: tuple[str, ...]) -> None:
    merging = ("merge=worst_with_worst", "merge.every_rounds=2", "batching.request=norm_test", "budget.rounds=9")
    ranks = run([0, 0, 1], *merging, "inner.lr=1e-2", "evaluation.every_rounds=3", *overrides)
    records = ranks[0]["records"]
    assert [record["round"] for record in records if "merge" in record] == [3]
    last = min(candidate["validation_loss"] for candidate in ranks[0]["result"]["candidates"])
    assert last < 0.8 * records[0]["validation_loss"]
    assert all(record["bytes_sent"]["outer"] > 0 for record in records if record["round"] > 0)
    measured = [record for record in records if record.get("statistics") or record.get("noise_scale")]
    assert measured, "statistics within each worker"


def test_radial_means_have_the_mean_length() -> None:
    """By hand, of two workers on one rank, one of which counts for half."""
    trainer = new_trainer(small_settings("outer=average", "outer.radial=true", "wire.fragments=3"), 2)
    trainer.workers[1].weight = 0.5
    layout, before = trainer.flat_model.parameter_layout, trainer.anchor.clone()
    changes = [torch.randn(len(before), dtype=before.dtype) for _ in trainer.workers]
    for change, worker in zip(changes, trainer.workers, strict=True):
        for gap in layout.gaps(change, range(len(layout.names))):
            gap.zero_()
        worker.weights.sub_(change)
    for fragment in range(3):
        outer(trainer, None, fragment)
    found = layout.views(before - trainer.anchor)
    for index, (name, one, other) in enumerate(zip(found, *(layout.views(c).values() for c in changes), strict=True)):
        if index in trainer.flat_model.embeddings:
            expected = (one + other / 2) / 1.5
        else:
            direction = one / one.norm() + other / other.norm() / 2
            expected = direction / direction.norm() * (one.norm() + other.norm() / 2) / 1.5
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-9)
    assert trainer.flat_model.embeddings == {layout.names.index("transformer.wte.weight"),
                                             layout.names.index("transformer.wpe.weight")}  # fmt: skip


def test_a_worker_that_leaps_is_left_out_and_recorded() -> None:
    trainer = new_trainer(small_settings("outer=average", "outer.outlier_deviations=3", "outer.outlier_rounds=5"), 2)
    steps = []
    for number in range(8):
        before = trainer.anchor.clone()
        for worker in trainer.workers:
            worker.weights[worker.id] += 1.0 + 0.1 * (number % 3) + (100.0 if (number, worker.id) == (6, 1) else 0.0)
        steps.append(outer(trainer, None))
        assert all(torch.equal(worker.weights, trainer.anchor) for worker in trainer.workers)
        if number == 6:
            assert trainer.anchor[1] == before[1], "of the other worker alone"
            assert trainer.anchor[0] == before[0] + 1.0
    assert [step.outliers for step in steps] == [[]] * 6 + [[1], []]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_worker_that_restarts_in_the_middle_of_a_round_counts_with_the_next_fragment(broken: float) -> None:
    """Losses before it restarted say nothing of what it has learned since; the round's mean loss stays unknown."""
    settings = small_settings("outer=average", "wire.fragments=2", "algorithm.updates_per_round=9")
    trainer = new_trainer(settings, 2)
    one, other = trainer.workers
    for worker in trainer.workers:
        worker.begin_round(reset_moments=False)
        worker.loss_sum += 2.0
    one.loss_sum += broken
    one.weights[0] = broken
    assert outer(trainer, None, 1).nonfinite == [one.id]
    assert torch.equal(one.weights, trainer.anchor)
    one.loss_sum += 2.0
    one.weights.add_(1.0)
    step = outer(trainer, None, 0)
    assert (step.nonfinite, step.num_finite) == ([], 2)
    assert math.isnan(one.mean_loss(1)) and other.mean_loss(1) == 2.0
    one.loss_sum += broken
    assert outer(trainer, None, 1).nonfinite == [one.id], "broken again"


@pytest.mark.parametrize("fragments", [2, 5])
def test_fragments_averaged_at_one_time_are_the_whole(fragments: int) -> None:
    """To the last bit: they are sums of the same numbers in the same order."""

    def stepped(count: int) -> list[torch.Tensor]:
        trainer = new_trainer(
            small_settings("outer=average", f"wire.fragments={count}", "algorithm.updates_per_round=9"), 3
        )
        for number, worker in enumerate(trainer.workers):
            worker.weights.mul_(1.01 + 0.01 * number)
        for fragment in range(count):
            outer(trainer, None, fragment)
        return [trainer.anchor, *(worker.weights for worker in trainer.workers)]

    for one, other in zip(stepped(1), stepped(fragments), strict=True):
        assert torch.equal(one, other)


def test_a_step_is_brought_to_the_workers_that_await_it_once() -> None:
    trainer = new_trainer(small_settings("outer=average", "wire.delay_updates=1"), 2)
    for number, worker in enumerate(trainer.workers):
        worker.weights.add_(1.0 + number)
    start(trainer, None, 0, is_delayed=True)
    before = trainer.anchor.clone()
    one, other = trainer.workers
    one.weights.add_(1.0)
    report = complete(trainer)
    assert report.num_finite == 2
    torch.testing.assert_close(trainer.anchor, before + 1.5)
    assert complete(trainer).num_finite is None, "nothing is under way any more"
    for _ in range(2):
        mix(trainer, 0)
    torch.testing.assert_close(one.weights, before + 1.5 + 1.0, msg="it keeps what it has learned meanwhile")
    torch.testing.assert_close(other.weights, before + 1.5)


def test_what_is_learned_while_an_average_travels_is_averaged_with_the_next() -> None:
    """Two workers that move by constants: with plain averaging the anchor moves by their mean, update for update."""
    trainer = new_trainer(small_settings("outer=average", "wire.delay_updates=1"), 2)
    before = trainer.anchor.clone()
    for taken in range(4):
        start(trainer, None, 0, is_delayed=True)
        expected = before + 1.5 * taken
        for number, worker in enumerate(trainer.workers):
            worker.weights.add_(1.0 + number)
        mix(trainer, 0)
        torch.testing.assert_close(trainer.anchor, expected)
        for number, worker in enumerate(trainer.workers):
            torch.testing.assert_close(worker.weights, expected + 1.0 + number)


def test_what_is_under_way_is_brought_to_workers_before_the_next_average() -> None:
    trainer = new_trainer(small_settings("outer=average", "wire.delay_updates=1"), 2)
    before = trainer.anchor.clone()
    for worker in trainer.workers:
        worker.weights.add_(1.0)
    start(trainer, None, 0, is_delayed=True)
    complete(trainer)  # a checkpoint has waited for it
    for worker in trainer.workers:
        worker.weights.add_(2.0)
    mix_awaited(trainer)
    start(trainer, None, 0, is_delayed=True)
    complete(trainer)
    torch.testing.assert_close(trainer.anchor, before + 3.0, msg="nothing counts twice")


def break_averages(pool: LocalPool) -> None:
    """The rank's averages fail in their thread."""
    if pool.runtime.rank == 1:
        for trainer in pool.trainers.values():
            trainer.averager = Broken()


class Broken(FullPrecision):
    def all_reduce(
        self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None
    ) -> torch.Tensor:
        raise ArithmeticError("the average broke")


def fail_in_the_background(runtime: Runtime) -> str:
    with pytest.raises(Exception) as raised:
        train_small_pool(runtime, *WORKERS, *STREAMED, "cluster.outer_seconds=5", prepare=break_averages)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_an_average_that_fails_in_its_thread_fails_the_rank() -> None:
    alone, broken = run_ranks(fail_in_the_background, [0, 0])
    assert broken == "ArithmeticError: the average broke"
    assert "RuntimeError" in alone or "timed out" in alone.lower(), alone


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("wire.fragments=0",), "wire.fragments=0: must be >= 1"),
        (
            ("wire.fragments=4",),
            "wire.fragments=4: must be <= algorithm.updates_per_round=3: each has its own time in a round",
        ),
        (
            ("wire.delay_updates=3",),
            "wire.delay_updates=3: must be < the 3 updates between two averages (algorithm.updates_per_round=3, "
            "wire.fragments=1)",
        ),
        (("wire.fraction=0",), "wire.fraction=0.0: must be in (0, 1]"),
        (("wire.residual_decay=2",), "wire.residual_decay=2.0: must be in [0, 1]"),
        (
            ("algorithm=ddp", "pool.trainers=1", "wire=int4"),
            "wire.format=int4: algorithm=ddp averages gradients, at every update; use wire=fp32",
        ),
        (
            ("wire=sparse", "outer=nesterov"),
            "wire.format=sparse: keeps what it has not sent, and an outer momentum would count that twice; set "
            "outer=average",
        ),
        (
            ("wire.error_feedback=true",),
            "wire.error_feedback=True: wire.format=fp32 takes nothing away; leave it out, or choose another format",
        ),
        (
            ("wire=int4", "wire.error_feedback=true", "outer.radial=true"),
            "outer.radial=True: restores lengths, which error feedback would count twice; choose one of them",
        ),
        (("outer.outlier_deviations=0",), "outer.outlier_deviations=0.0: must be > 0, or null"),
        (("outer.outlier_rounds=1",), "outer.outlier_rounds=1: must be >= 2 rounds"),
        (
            ("wire.delay_updates=1", "batching.request=norm_test", "batching.estimator=workers"),
            "batching.estimator=workers: needs workers at one point, and wire.fragments or wire.delay_updates keep "
            "them apart; use sketch",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingsError) as raised:
        small_settings(*overrides)
    assert str(raised.value) == line


def test_averages_that_travel_need_all_their_groups() -> None:
    rule = "wire.delay_updates=2: keeps averages of all trainers under way, and a rank may be in 2 groups for that"
    with pytest.raises(AssertionError, match=f"{rule}, of which 1 may be formed; set cluster.max_communicators=2"):
        run([0, 0, 0], "pool.workers_per_trainer=2", "wire.delay_updates=2", "cluster.max_communicators=1")


def test_more_fragments_than_tensors_are_refused_before_training() -> None:
    with pytest.raises(AssertionError, match=r"wire.fragments=40: must be <= the \d+ tensors that the model trains"):
        run_ranks(train_small_pool, [0], *WORKERS, "algorithm.updates_per_round=50", "wire.fragments=40")
