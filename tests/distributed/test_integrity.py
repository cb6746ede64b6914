"""Ranks of a trainer hold the same bits; workers that are not finite are named, left out, and in no checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from adloco_dist.averaging.checks import RanksDisagreeError
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy.plan import NONFINITE
from adloco_dist.pool.local_pool import LocalPool
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS, held_anchors

POOL = ("pool.trainers=2", "pool.workers_per_trainer=2", "merge=none", "checkpoint.every=1rounds", "budget=6rounds")


def train_apart(runtime: Runtime, folder: str, after: str, number: int, *overrides: str) -> str:
    """One bit of rank 1's anchor of trainer 1 flips when the trainer has done something so often."""

    def prepare(pool: LocalPool) -> None:
        if runtime.rank == 1:
            trainer = pool.trainers[1]
            done, calls = getattr(trainer, after), []

            def with_a_fault(*values: Any) -> Any:
                calls.append(1)
                found = done(*values)
                if len(calls) == number:
                    trainer.anchor[5] = np.nextafter(float(trainer.anchor[5]), 1.0)
                return found

            setattr(trainer, after, with_a_fault)

    with pytest.raises(RanksDisagreeError) as raised:
        train_kept(runtime, folder, None, *FOUR_TRAINERS, *POOL, *overrides, prepare=prepare)
    return str(raised.value)


def test_an_anchor_that_differs_names_the_ranks_and_comes_into_no_checkpoint(tmp_path: Path) -> None:
    detail = run_ranks(train_apart, [0, 0], str(tmp_path), "average_anchors", 3)
    assert set(detail) == {"after round 3: the anchor of trainer 1 differs between rank 0 and rank 1"}
    assert last_round_saved(tmp_path) <= 2


def test_an_anchor_that_differs_by_an_average_that_was_late_comes_into_no_checkpoint(tmp_path: Path) -> None:
    """It arrives after the reports of its round, where the anchor is saved."""
    late = ("algorithm.updates_per_round=3", "wire.delay_updates=1")
    detail = run_ranks(train_apart, [0, 0], str(tmp_path), "complete", 5, *late)
    (line,) = set(detail)
    assert line.endswith("the anchor of trainer 1 differs between rank 0 and rank 1")
    assert last_round_saved(tmp_path) < int(line.split()[2].rstrip(":"))


def last_round_saved(folder: Path) -> int:
    """The last round of which there is a checkpoint; 0: there is none."""
    saved = (folder / "shared" / "checkpoints").iterdir()
    return max((int(path.name.rpartition("-")[2]) for path in saved), default=0)


def train_spoilt(runtime: Runtime, folder: str, *overrides: str) -> dict[str, Any]:
    return train_kept(runtime, folder, None, *FOUR_TRAINERS, *POOL, *overrides)


def test_workers_that_are_never_finite_stop_the_run_with_its_last_good_anchors(tmp_path: Path) -> None:
    mad = ("inner.lr=1e300", "inner.clip_norm=null", "budget=12rounds", "checkpoint.every=null")
    ended = run_ranks(train_spoilt, [0, 0], str(tmp_path), *mad)
    assert {rank["stop"] for rank in ended} == {NONFINITE}
    rows = [row for row in ended[0]["records"] if row["round"]]
    assert [(row["round"], row["finite_workers"], row.get("nonfinite_workers", [])) for row in rows] == [
        (round_, 0, [0, 1]) for round_ in range(1, 12) for _ in range(2)
    ], "ten rounds in a row, and the one that was under way when they were known"
    (checkpoint,) = (tmp_path / "shared" / "checkpoints").iterdir()
    initial = {}
    for trainer, anchor in held_anchors(ended).items():
        assert np.isfinite(anchor).all()
        np.testing.assert_array_equal(load_file(checkpoint / f"trainer-{trainer}.safetensors")["anchor"], anchor)
        initial[trainer] = anchor
    np.testing.assert_array_equal(initial[0], initial[1])
    resumed = run_ranks(train_spoilt, [0, 0], str(tmp_path), "budget=12rounds")
    assert {rank["stop"] for rank in resumed} == {"budget=12rounds reached"}
    assert any(line.startswith("resumes with inner.lr=") for line in resumed[0]["reported"])
    assert all(row["finite_workers"] == 2 for row in resumed[0]["records"])


@pytest.mark.parametrize("overrides", [(), ("pool.trainers=1", "algorithm=ddp", "batching.request=none")])
def test_a_budget_spent_by_workers_that_are_never_finite_is_no_success(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    mad = ("inner.lr=1e300", "inner.clip_norm=null", "budget=2rounds", *overrides)
    ended = run_ranks(train_spoilt, [0, 0], str(tmp_path), *mad)
    assert {rank["stop"] for rank in ended} == {NONFINITE}
    for anchor in held_anchors(ended).values():
        assert np.isfinite(anchor).all()
    assert {row["finite_workers"] for row in ended[0]["records"] if row["round"]} == {0}
    again = run_ranks(train_spoilt, [0, 0], str(tmp_path), *mad)
    assert {rank["stop"] for rank in again} == {NONFINITE}, "a checkpoint knows it"
