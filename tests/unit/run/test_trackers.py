"""What trackers are given of a run's records, and what is refused before training."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from adloco_dist.config import SettingsError, TrackingSettings
from adloco_dist.config.compose import compose
from adloco_dist.run.follow import Rounds
from adloco_dist.run.rows import Record
from adloco_dist.run.tracking import check_trackers
from adloco_dist.sweep.sweep import expand
from helpers.run_directories import before_training, row


def lines(records: Sequence[Record]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_a_round_has_the_numbers_of_all_its_trainers_and_the_totals_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [*before_training(0, 1), row(1, 0), row(1, 1, train_loss=3.0), row(2, 0)]
    path.write_bytes(lines(rows))
    rounds = dict(Rounds(path).read(is_over=True))
    assert list(rounds) == [0, 1, 2]
    assert (rounds[0]["trainer0/validation_loss"], rounds[0]["trainer1/validation_loss"]) == (5.0, 5.0)
    assert (rounds[1]["trainer0/train_loss"], rounds[1]["trainer1/train_loss"]) == (3.99, 3.0)
    assert rounds[1]["trainer1/bytes_sent/outer"] == 2_000_000
    assert not any(name.startswith("trainer1/") for name in rounds[2]), "it has ended"
    totals = [
        tuple(values[axis] for axis in ("round", "updates", "pool_tokens", "bytes")) for values in rounds.values()
    ]
    assert totals == [(0, 0, 0, 0), (1, 4, 1000, 2 * 2_000_500), (2, 8, 2000, 3 * 2_000_500)]
    assert [values["elapsed_seconds"] for values in rounds.values()] == [0.0, 10.0, 20.0]


def test_rounds_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"")
    written = lines([row(1, 0), row(1, 1), row(2, 0)])
    rounds = Rounds(path)
    assert list(rounds.read(is_over=False)) == []
    read = []
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(written), 100):  # every look finds a part of a line more
            file.write(written[start : start + 100])
            read += rounds.read(is_over=False)
    read += rounds.read(is_over=False)
    numbers = [number for number, _ in read]
    assert numbers == sorted(numbers)
    assert {name for number, values in read if number == 1 for name in values} >= {
        "trainer0/train_loss", "trainer1/train_loss"
    }  # fmt: skip
    assert read[-1][0] == 2
    assert read[-1][1]["bytes"] == 3 * 2_000_500, "each line counted once"
    assert read[-1][1]["updates"] == 8
    assert list(rounds.read(is_over=True)) == [], "everything was given"


def test_the_newest_round_waits_for_its_other_trainers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines([row(1, 0)]))
    rounds = Rounds(path)
    assert list(rounds.read(is_over=False)) == []
    with path.open("ab") as file:
        file.write(lines([row(1, 1)]))
    assert list(rounds.read(is_over=False)) == []
    ((number, values),) = rounds.read(is_over=False)
    assert number == 1
    assert {"trainer0/train_loss", "trainer1/train_loss"} <= values.keys()


def test_rounds_of_earlier_starts_count_in_the_totals_alone(tmp_path: Path) -> None:
    path, earlier = tmp_path / "metrics.jsonl", lines([*before_training(0), row(1), row(2)])
    path.write_bytes(earlier + lines([row(3)]))
    rounds = Rounds(path)
    assert rounds.skip(len(earlier)) == 3
    ((number, values),) = rounds.read(is_over=True)
    assert (number, values["updates"], values["bytes"]) == (3, 12, 3 * 2_000_500)
    assert Rounds(path).skip(0) == 0


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(TrackingSettings(tensorboard=True))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    check_trackers(TrackingSettings())
    with pytest.raises(SettingsError, match=r"^tracking.tensorboard=True: .* pip install tensorboard"):
        check_trackers(TrackingSettings(tensorboard=True))


def test_weights_and_biases_online_needs_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    online = compose(["tracking.mode=online"]).tracking
    with pytest.raises(SettingsError, match=r"^tracking.mode=online: nobody is logged in .*tracking=offline"):
        check_trackers(online)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_trackers(online)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("tracking.project=a/b", "must be 1 to 128 characters, and none of"),
        ("tracking.project=''", "must be 1 to 128 characters"),
        ("tracking.name=''", "write null for the default"),
        (f"tracking.tags=[{'a' * 65}]", "a tag must have 1 to 64 characters"),
        ("tracking.patience_seconds=0", "must be > 0 seconds"),
    ],
)
def test_what_weights_and_biases_would_refuse_is_refused_before_training(override: str, rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        compose([override])


def test_runs_of_a_sweep_share_a_group() -> None:
    points, _ = expand(["seed=1,2", "hydra.sweep.dir=some/grid"])
    for point in points:
        assert compose(point.arguments([], is_tracked=True)).tracking.group == "grid"
        untracked = point.arguments([], is_tracked=False)
        assert not [argument for argument in untracked if argument.startswith("tracking.")], (
            "it would be read by nobody"
        )
    points, _ = expand(["seed=1,2", "tracking.group=mine"])
    assert [compose(point.arguments([], is_tracked=True)).tracking.group for point in points] == ["mine", "mine"]
    points, _ = expand(["tracking.name=a,b"])
    assert [compose(point.arguments([], is_tracked=True)).tracking.name for point in points] == ["a", "b"]
    with pytest.raises(SettingsError, match=r"^tracking.name=a: all runs of the sweep would have this name"):
        expand(["seed=1,2", "tracking.name=a"])
