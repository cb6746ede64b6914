"""What trackers are given of a run's records, and what is refused before training."""

import math
import sys
from pathlib import Path

import pytest

from adloco_dist.config import SettingsError, TrackingSettings
from adloco_dist.config.compose import compose
from adloco_dist.run.tracking import check_trackers, with_totals
from adloco_dist.sweep.points import expand
from adloco_dist.sweep.sweep import with_directory
from helpers.run_directories import before_training, row, typed


def test_a_round_has_the_numbers_of_all_its_trainers_and_the_totals_of_the_run() -> None:
    records = [before_training(0, 1), [row(1, 0), row(1, 1, train_loss=3.0)], [row(2, 0)]]
    rounds = list(with_totals(iter(map(typed, records))))
    assert (rounds[0]["trainer0/validation_loss"], rounds[0]["trainer1/validation_loss"]) == (5.0, 5.0)
    assert (rounds[1]["trainer0/train_loss"], rounds[1]["trainer1/train_loss"]) == (3.99, 3.0)
    assert rounds[1]["trainer1/bytes_sent/outer"] == 2_000_000
    assert rounds[1]["trainer1/resources/1/memory_bytes"] == 5e8
    assert not any(name.startswith("trainer1/") for name in rounds[2]), "it has ended"
    totals = [tuple(values[axis] for axis in ("round", "updates", "pool_tokens", "bytes")) for values in rounds]
    assert totals == [(0, 0, 0, 0), (1, 4, 1000, 2 * 2_000_500), (2, 8, 2000, 3 * 2_000_500)]
    assert [values["elapsed_seconds"] for values in rounds] == [0.0, 10.0, 20.0]


def test_a_number_that_is_not_finite_is_left_out() -> None:
    (values,) = with_totals(iter([typed([row(1, train_loss=math.inf, worth=math.nan)])]))
    assert not {"trainer0/train_loss", "trainer0/worth"} & values.keys()


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
        ("tracking.group=''", "write null for the default"),
    ],
)
def test_what_weights_and_biases_would_refuse_is_refused_before_training(override: str, rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        compose([override])


def test_runs_of_a_sweep_share_a_group() -> None:
    def group(*more: str) -> list[str | None]:
        points, _ = expand(["seed=1,2", *more])
        due = [with_directory(point, compose(point.overrides)) for point in points]
        return [compose(point.overrides).tracking.group for point in due]

    assert group("hydra.sweep.dir=some/grid") == ["grid", "grid"]
    assert group("tracking.group=mine") == ["mine", "mine"]
    points, _ = expand(["seed=1,2", "tracking=none"])
    for point in points:
        overrides = with_directory(point, compose(point.overrides)).overrides
        assert not [one for one in overrides if one.startswith("tracking.")], "it would be read by nobody"
