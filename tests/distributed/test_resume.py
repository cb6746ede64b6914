"""A run that was interrupted, anywhere, and resumes is the run that was never stopped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.setup import concurrency
from helpers.clocks import without_clocks
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS, SIMULATED_CLOCK, held_anchors

POOL = (
    *FOUR_TRAINERS,
    "pool.trainers=3",
    "pool.workers_per_trainer=2",
    "budget=7rounds",
    "merge=worst_with_worst",
    "merge.every_rounds=2",
    "batching.request=norm_test",
    "checkpoint.every=null",
)
ALL_UPDATES = 39
"""Looks until a rank sees the request when it has taken all updates of a round."""


def run(
    nodes: list[int], folder: Path, looks: int | None, *overrides: str, pool: Sequence[str] = POOL, **options: Any
) -> list[dict[str, Any]]:
    return run_ranks(train_kept_with, nodes, str(folder), looks, [*pool, *overrides], options)


def train_kept_with(runtime: Any, folder: str, looks: int | None, overrides: list[str], options: Any) -> Any:
    return train_kept(runtime, folder, looks, *overrides, **options)


def assert_same(ended: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float = 0.0) -> None:
    for name in ("anchors", "momentum"):
        expected = held_anchors([{"anchors": rank[name]} for rank in reference])
        for trainer, vector in held_anchors([{"anchors": rank[name]} for rank in ended]).items():
            np.testing.assert_allclose(vector, expected[trainer], rtol=0, atol=tolerance)
    cursors = {trainer: cursor for rank in reference for trainer, cursor in rank["cursors"].items()}
    assert {trainer: cursor for rank in ended for trainer, cursor in rank["cursors"].items()} == cursors


BY_LINK = (
    "algorithm.round=link", "algorithm.updates_range=[2,7]", "simulation.update_seconds=1",
    "simulation.bytes_per_second=1e4", "merge=none", "pool.trainers=1",
)  # fmt: skip
"""Rounds of 3, then 5 to 7 updates, as long as averages take on a simulated link."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ended = run([0, 0], tmp_path_factory.mktemp("whole"), None)
    assert len(held_anchors(ended)) == 1, "three trainers have become one"
    return ended


@pytest.mark.parametrize("looks", [1, 18, ALL_UPDATES])
def test_stopped_at_any_update_and_resumed_is_the_same_run(
    uninterrupted: list[dict[str, Any]], tmp_path: Path, looks: int
) -> None:
    stopped = run([0, 0], tmp_path, looks)
    assert {rank["stop"] for rank in stopped} == {INTERRUPTED}
    assert len({rank["round"] for rank in stopped}) == 1, "in the same round on all ranks"
    ended = run([0, 0], tmp_path, None)
    assert_same(ended, uninterrupted)
    records = [*stopped[0]["records"], *ended[0]["records"]]
    assert without_clocks(records) == without_clocks(uninterrupted[0]["records"]), "no round twice, none left out"
    written = (tmp_path / "shared" / "metrics.jsonl").read_text().splitlines()
    assert len(written) == len(uninterrupted[0]["records"])


def test_stopped_again_and_again(uninterrupted: list[dict[str, Any]], tmp_path: Path) -> None:
    starts = 0
    ended = run([0, 0], tmp_path, 5)
    while ended[0]["stop"] == INTERRUPTED:
        starts += 1
        assert starts < 30
        ended = run([0, 0], tmp_path, 5 + 8 * starts)
    assert starts > 2
    assert_same(ended, uninterrupted)


@pytest.mark.parametrize(("looks", "nodes"), [(14, [0]), (25, [0, 1, 1]), (25, [0, 0, 1, 1])])
def test_on_another_number_of_ranks_it_is_the_same_run(
    uninterrupted: list[dict[str, Any]], tmp_path: Path, looks: int, nodes: list[int]
) -> None:
    run([0, 0], tmp_path, looks)
    ended = run(nodes, tmp_path, None)
    assert f"workers of 2 ranks are placed on {len(nodes)}" in ended[0]["reported"][-1]
    assert_same(ended, uninterrupted, tolerance=1e-9)


ALGORITHMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sgd, shared data, int8": (
        11, ("inner=sgd", "inner.momentum=0.9", "data.shards=shared", "precision=fp32", "wire=int8"),
    ),
    "int4, delayed": (20, ("algorithm.updates_per_round=6", "wire=int4", "wire.fragments=2", "wire.delay_updates=2")),
    "muon, threads": (20, ("inner=muon", "outer.average_span=0.3", "instances.concurrency=threads", "wire=int8")),
    "sparse, by the link": (11, (*BY_LINK, "wire=sparse", "wire.fragments=2", "wire.delay_updates=1", "outer=average")),
    "waited for, by the link": (
        11, (*BY_LINK, "algorithm.updates_range=[1,7]", "simulation.bytes_per_second=1e9", "wire=adaptive",
             "outer=average", "outer.average_span=0.3"),
    ),
    "ddp": (4, ("pool.trainers=1", "merge=none", "algorithm=ddp", "batching.request=none")),
}  # fmt: skip
"""Looks until the stop, and settings. Every optimizer, format, kind of round and of state is in one of these."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whatever_the_algorithm(tmp_path: Path, algorithm: str) -> None:
    looks, overrides = ALGORITHMS[algorithm]
    reference = run([0, 0], tmp_path / "whole", None, *overrides)
    assert run([0, 0], tmp_path / "stopped", looks, *overrides)[0]["stop"] == INTERRUPTED
    assert_same(run([0, 0], tmp_path / "stopped", None, *overrides), reference)


def test_what_is_left_of_the_largest_elements_of_three_ranks(tmp_path: Path) -> None:
    """Each rank keeps what its own message and that of the sum that it owns have left."""
    sparse = ("wire=sparse", "wire.fraction=0.1", "outer=average", "pool.trainers=1", "pool.workers_per_trainer=3")
    reference = run([0, 0, 0], tmp_path / "whole", None, *sparse, "merge=none")
    assert run([0, 0, 0], tmp_path / "stopped", 11, *sparse, "merge=none")[0]["stop"] == INTERRUPTED
    assert_same(run([0, 0, 0], tmp_path / "stopped", None, *sparse, "merge=none"), reference)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0]])
def test_what_is_trained_by_default(tmp_path: Path, nodes: list[int]) -> None:
    """Of three ranks each keeps what is left of the sums that it owns, too."""

    def default(folder: Path, looks: int | None) -> list[dict[str, Any]]:
        fast = (*SIMULATED_CLOCK, "simulation.bytes_per_second=1e7", f"pool.workers_per_trainer={len(nodes)}")
        return run(nodes, folder, looks, *fast, "budget=7rounds", "checkpoint.every=null", pool=())

    reference = default(tmp_path / "whole", None)
    dense = [record.get("in_four_bits", False) for record in reference[0]["records"] if record["round"]]
    assert dense == sorted(dense), "signs, and then 4 bits"
    assert set(dense) == {False, True}
    assert default(tmp_path / "stopped", 11)[0]["stop"] == INTERRUPTED
    assert_same(default(tmp_path / "stopped", None), reference)


def test_checkpoints_come_at_their_interval_and_the_newest_whole_one_is_used(
    uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = ("checkpoint.every=2rounds", "checkpoint.keep_last=3")
    assert_same(run([0, 0], tmp_path, None, *settings), uninterrupted)
    checkpoints = tmp_path / "shared" / "checkpoints"
    rounds = {int(path.name.rpartition("-")[2]): path for path in checkpoints.iterdir()}
    assert len(rounds) == 3
    assert max(rounds) < 7, "nothing needs to resume from the end"
    (tmp_path / "shared" / "run.json").unlink()  # as if it had been killed before its end
    (rounds[max(rounds)] / "trainer-0.safetensors").unlink(missing_ok=True)
    for part in rounds[max(rounds)].glob("trainer-*-worker-1.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    ended = run([0, 0], tmp_path, None, *settings)
    skipped, resumed = ended[0]["reported"][:2]
    assert skipped.startswith(f"checkpoint {rounds[max(rounds)].name} is skipped: trainer-")
    assert resumed.endswith(sorted(rounds.values())[-2].name)
    assert_same(ended, uninterrupted)


def test_nodes_with_directories_of_their_own(uninterrupted: list[dict[str, Any]], tmp_path: Path) -> None:
    run([0, 1], tmp_path, 20, own_directories=True)
    for node in (0, 1):
        files = {path.name for path in (tmp_path / f"node{node}" / "checkpoints").glob("*/*")}
        assert {"state.json", "manifest.json", "metrics.jsonl"} <= files, "a copy of everything is on each of two"
    for path in (tmp_path / "node0").glob("checkpoints/*/*"):  # the node of rank 0 comes back without its disk
        path.unlink()
    (tmp_path / "node0" / "metrics.jsonl").unlink()
    ended = run([0, 1], tmp_path, None, own_directories=True)
    assert_same(ended, uninterrupted)
    rows = (tmp_path / "node0" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == len(uninterrupted[0]["records"])


def test_a_part_that_nobody_holds_costs_its_checkpoint(tmp_path: Path) -> None:
    run([0, 1], tmp_path, 20, "checkpoint.copies=false", own_directories=True)
    (tmp_path / "node1" / "checkpoints").rename(tmp_path / "gone")
    (tmp_path / "node1" / "checkpoints").mkdir()
    ended = run([0, 1], tmp_path, None, own_directories=True)
    assert "is skipped: trainer-" in ended[0]["reported"][0]
    assert "holds no whole checkpoint: the run starts from the beginning" in ended[0]["reported"][1]


def train_without_measuring(runtime: Any, folder: str) -> Any:
    def refuse(*arguments: object) -> None:
        raise AssertionError("how instances compute was measured at the first start")

    concurrency._measure = refuse
    return train_kept(runtime, folder, None, *POOL, "instances.concurrency=auto")


def test_how_instances_compute_is_measured_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was measured at the first start"):
        run_ranks(train_without_measuring, [0, 0], str(tmp_path / "fresh"))
    stopped = run([0, 0], tmp_path, 6, "instances.concurrency=auto")
    assert {rank["stop"] for rank in stopped} == {INTERRUPTED}
    ended = run_ranks(train_without_measuring, [0, 0], str(tmp_path))
    assert {rank["stop"] for rank in ended} == {"budget=7rounds reached"}
