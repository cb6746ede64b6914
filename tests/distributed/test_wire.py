"""How pseudo-gradients travel, in the launcher: fragments, delays and formats on any placement, through merges."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from adloco_dist.averaging.averager import Commit, FullPrecision
from adloco_dist.averaging.group import Group
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import MergeReport
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round import steps
from helpers.processes import run_ranks
from helpers.support import (
    FOUR_TRAINERS,
    held_anchors,
    new_trainer,
    small_settings,
    train_small_pool,
)

WORKERS = ("pool.trainers=2", "pool.workers_per_trainer=4", "algorithm.updates_per_round=6", "budget=3rounds")
STREAMED = ("wire.fragments=2", "wire.delay_updates=2")


def run(nodes: list[int], *overrides: str) -> list[dict[str, Any]]:
    return run_ranks(train_small_pool, nodes, *FOUR_TRAINERS, *WORKERS, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [("wire.fragments=3",), STREAMED, (*STREAMED, "instances.concurrency=threads")],
)
def test_placement_changes_nothing(overrides: tuple[str, ...]) -> None:
    alone = held_anchors(run([0], *overrides))
    for trainer, anchor in held_anchors(run([0, 0, 1, 1], *overrides)).items():
        np.testing.assert_allclose(anchor, alone[trainer], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 2e-4), ("int8", 5e-4), ("int4", 1e-2)])
def test_placement_changes_no_more_than_rounding_does(wire: str, tolerance: float) -> None:
    """Alone nothing travels. In one round a weight moves by about 3e-3; the rounded steps add up over three."""
    alone = held_anchors(run([0], f"wire={wire}"))
    for trainer, anchor in held_anchors(run([0, 0, 1, 1], f"wire={wire}")).items():
        np.testing.assert_allclose(anchor, alone[trainer], rtol=0, atol=tolerance)
        assert not np.array_equal(anchor, alone[trainer])


@pytest.mark.parametrize("fragments", [1, 2])
def test_averages_that_are_waited_for_may_start_as_those_that_travel_do(fragments: int) -> None:
    """A delay that the link chooses may be none: the same steps, which reach workers as late ones would."""
    rounds = (
        "algorithm.round=link", f"algorithm.updates_range=[{fragments},{fragments}]", f"wire.fragments={fragments}",
        "simulation.update_seconds=1", "outer=average", "budget=7rounds",
    )  # fmt: skip
    named, chosen = (run([0, 0], *rounds, f"wire.delay_updates={delay}") for delay in ("0", "null"))
    assert {record["delay_updates"] for record in chosen[0]["records"] if record["round"]} == {0}
    expected = held_anchors(named)
    for trainer, anchor in held_anchors(chosen).items():
        np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-12)


@pytest.mark.parametrize("overrides", [STREAMED, ("wire=slow_link", "wire.fragments=2", "wire.delay_updates=1")])
def test_trainers_learn_and_merge_while_averages_travel(overrides: tuple[str, ...]) -> None:
    merging = ("merge=worst_with_worst", "merge.every_rounds=2", "batching.request=norm_test", "budget=9rounds")
    ranks = run([0, 0, 1], *merging, "inner.lr=1e-2", "evaluation.every=3rounds", *overrides)
    records = ranks[0]["records"]
    assert [record["round"] for record in records if "merge" in record] == [3]
    last = min(candidate["validation_loss"] for candidate in ranks[0]["result"]["candidates"])
    assert last < 0.8 * records[0]["validation_loss"]
    assert all(record["bytes_sent"]["outer"] > 0 for record in records if record["round"] > 0)
    measured = [record for record in records if record.get("statistics") or record.get("noise_scale")]
    assert measured, "statistics within each worker"


def train_and_owe(runtime: Runtime, wire: str) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """What this rank owes of all trainers before and after each merge."""
    found, exact = [], steps.regroup

    def owed(pool: LocalPool) -> npt.NDArray[Any]:
        kept = [trainer.residual.numpy() for trainer in pool.trainers.values() if trainer.residual is not None]
        return np.sum(kept, axis=0)

    def watched(pool: LocalPool, before: Layout, plan: RoundPlan) -> MergeReport:
        owed_before = owed(pool)
        report = exact(pool, before, plan)
        found.append((owed_before, owed(pool)))
        return report

    steps.regroup = watched
    merging = ("pool.trainers=2", "merge=worst_with_worst", "merge.every_rounds=2", "budget=4rounds",
               "batching.request=norm_test", "batching.eta=0.7")  # fmt: skip
    kept = (wire, "outer=average", "pool.workers_per_trainer=3", "pool.placement=spread")
    train_small_pool(runtime, *FOUR_TRAINERS, *merging, *kept)
    return found


@pytest.mark.parametrize("wire", ["wire=signs", "wire=sparse"])
@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 0, 0, 0, 0]])
def test_what_averages_have_left_behind_goes_into_a_merge(nodes: list[int], wire: str) -> None:
    """Of each trainer of three ranks, every rank keeps what its own message and that of its slice's sum leave."""
    (merges,) = zip(*run_ranks(train_and_owe, nodes, wire), strict=True)
    before, after = (np.sum([rank[place] for rank in merges], axis=0) for place in (0, 1))
    assert np.abs(before).sum() > 0
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_worker_that_restarts_in_the_middle_of_a_round_counts_with_the_next_fragment(broken: float) -> None:
    """Losses before it restarted say nothing of what it has learned since; the round's mean loss stays unknown."""
    settings = small_settings(*FOUR_TRAINERS, "outer=average", "wire.fragments=2", "algorithm.updates_per_round=9")
    trainer = new_trainer(settings, 2)
    one, other = trainer.workers
    for worker in trainer.workers:
        worker.begin_round(reset_moments=False)
        worker.loss_sum += 2.0
    one.loss_sum += broken
    one.weights[0] = broken
    assert trainer.step(1, None).nonfinite == [one.id]
    assert torch.equal(one.weights, trainer.anchor)
    one.loss_sum += 2.0
    one.weights.add_(1.0)
    step = trainer.step(0, None)
    assert (step.nonfinite, step.num_finite) == ([], 2)
    assert math.isnan(one.mean_loss(1)) and other.mean_loss(1) == 2.0
    one.loss_sum += broken
    assert trainer.step(1, None).nonfinite == [one.id], "broken again"


@pytest.mark.parametrize("fragments", [2, 5])
def test_fragments_averaged_at_one_time_are_the_whole(fragments: int) -> None:
    """To the last bit: they are sums of the same numbers in the same order."""

    def stepped(count: int) -> list[torch.Tensor]:
        trainer = new_trainer(
            small_settings(*FOUR_TRAINERS, "outer=average", f"wire.fragments={count}", "algorithm.updates_per_round=9"),
            3,
        )
        for number, worker in enumerate(trainer.workers):
            worker.weights.mul_(1.01 + 0.01 * number)
        for fragment in range(count):
            trainer.step(fragment, None)
        return [trainer.anchor, *(worker.weights for worker in trainer.workers)]

    for one, other in zip(stepped(1), stepped(fragments), strict=True):
        assert torch.equal(one, other)


def test_a_step_is_brought_to_the_workers_that_await_it_once() -> None:
    trainer = new_trainer(small_settings(*FOUR_TRAINERS, "outer=average", "wire.delay_updates=1"), 2)
    for number, worker in enumerate(trainer.workers):
        worker.weights.add_(1.0 + number)
    trainer.start(0, None, is_delayed=True)
    before = trainer.anchor.clone()
    one, other = trainer.workers
    one.weights.add_(1.0)
    report = trainer.complete()
    assert report.num_finite == 2
    torch.testing.assert_close(trainer.anchor, before + 1.5)
    assert trainer.complete().num_finite is None, "nothing is under way any more"
    for _ in range(2):
        trainer.mix(0)
    torch.testing.assert_close(one.weights, before + 1.5 + 1.0, msg="it keeps what it has learned meanwhile")
    torch.testing.assert_close(other.weights, before + 1.5)


def test_what_is_learned_while_an_average_travels_is_averaged_with_the_next() -> None:
    """Two workers that move by constants: with plain averaging the anchor moves by their mean, update for update."""
    trainer = new_trainer(small_settings(*FOUR_TRAINERS, "outer=average", "wire.delay_updates=1"), 2)
    before = trainer.anchor.clone()
    for taken in range(4):
        trainer.start(0, None, is_delayed=True)
        expected = before + 1.5 * taken
        for number, worker in enumerate(trainer.workers):
            worker.weights.add_(1.0 + number)
        trainer.mix(0)
        torch.testing.assert_close(trainer.anchor, expected)
        for number, worker in enumerate(trainer.workers):
            torch.testing.assert_close(worker.weights, expected + 1.0 + number)


def test_what_is_under_way_is_brought_to_workers_before_the_next_average() -> None:
    trainer = new_trainer(small_settings(*FOUR_TRAINERS, "outer=average", "wire.delay_updates=1"), 2)
    before = trainer.anchor.clone()
    for worker in trainer.workers:
        worker.weights.add_(1.0)
    trainer.start(0, None, is_delayed=True)
    trainer.complete()  # a checkpoint has waited for it
    for worker in trainer.workers:
        worker.weights.add_(2.0)
    trainer.mix_awaited()
    trainer.start(0, None, is_delayed=True)
    trainer.complete()
    torch.testing.assert_close(trainer.anchor, before + 3.0, msg="nothing counts twice")


def break_averages(pool: LocalPool) -> None:
    """The rank's averages fail in their thread."""
    if pool.runtime.rank == 1:
        for trainer in pool.trainers.values():
            trainer.averagers = [Broken(), Broken()]


class Broken(FullPrecision):
    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        raise ArithmeticError("the average broke")


def fail_in_the_background(runtime: Runtime) -> str:
    with pytest.raises(Exception) as raised:
        train_small_pool(
            runtime, *FOUR_TRAINERS, *WORKERS, *STREAMED, "cluster.timeout_seconds=5", prepare=break_averages
        )
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
        (
            ("algorithm=ddp", "pool.trainers=1", "wire=int4"),
            "wire.format=int4: algorithm=ddp averages gradients, at every update; use wire=fp32",
        ),
        (
            ("wire=sparse", "outer=nesterov"),
            "wire.format=sparse: keeps what it has not sent, and an outer momentum would count that twice; set "
            "outer=average",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingsError) as raised:
        small_settings(*FOUR_TRAINERS, *overrides)
    assert str(raised.value) == line


def test_more_fragments_than_tensors_are_refused_before_training() -> None:
    with pytest.raises(AssertionError, match=r"wire.fragments=40: must be <= the \d+ tensors that the model trains"):
        run([0], "algorithm.updates_per_round=50", "wire.fragments=40")
