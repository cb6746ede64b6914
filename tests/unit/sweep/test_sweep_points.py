"""How a sweep expands: points, their names, and where they are kept."""

from pathlib import Path

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.sweep.jobs import compose_launcher, launch_through
from adloco_dist.sweep.points import expand


def test_every_combination_is_a_point_named_by_what_sets_it_apart() -> None:
    points, hydra = expand(
        ["batching.switch_n=1.5,2,3", "model=nano", "batching.eta=0.5,0.8,1.0", "hydra/launcher=slurm"]
    )
    assert hydra == ["hydra/launcher=slurm"]
    assert len(points) == 9
    assert points[0].values == {"batching.switch_n": "1.5", "batching.eta": "0.5"}
    assert points[0].overrides == ("batching.switch_n=1.5", "model=nano", "batching.eta=0.5")
    assert points[0].directory.name == "batching.eta=0.5,batching.switch_n=1.5"
    assert points[0].log.name == "batching.eta=0.5,batching.switch_n=1.5.log"
    assert len({point.directory for point in points}) == 9


def test_a_larger_grid_finds_what_a_smaller_one_has_run() -> None:
    small, _ = expand(["batching.eta=0.5,0.8", "seed=1"])
    large, _ = expand(["seed=1", "batching.eta=0.3,0.5,0.8,0.8"])
    assert {point.directory for point in small} < {point.directory for point in large}
    assert len(large) == 3, "a value named twice is one run"
    other, _ = expand(["batching.eta=0.5,0.8", "seed=2"])
    assert {point.directory for point in small}.isdisjoint(point.directory for point in other)


def test_names_hold_no_separators_and_do_not_collide() -> None:
    points, _ = expand(["data=text", "data.train=[a/b.txt],[a_b.txt],[a/b.txt,c d.txt]"])
    assert len({point.directory for point in points}) == 3
    assert {point.directory.parent for point in points} == {points[0].directory.parent}
    assert points[0].overrides == ("data=text", "data.train=[a/b.txt]")
    long, _ = expand(["model.warm_start=" + ",".join(letter * 300 for letter in "ab")])
    assert all(len(point.log.name) < 255 for point in long)
    assert long[0].directory != long[1].directory


def test_where_a_sweep_is_kept() -> None:
    assert expand(["seed=1,2"])[0][0].directory.parent == Path("runs/sweep_seed")
    assert expand(["seed=1,2", "run.root=elsewhere"])[0][0].directory.parent.parent == Path("elsewhere")
    assert expand(["seed=1,2", "hydra.sweep.dir=mine"])[0][0].directory == Path("mine/seed=1")


@pytest.mark.parametrize("overrides", [["seed=1"], [], ["seed=interval(1,2)"], ["run.directory=a,b"], ["sed=1,2"]])
def test_what_is_no_sweep(overrides: list[str]) -> None:
    with pytest.raises(SettingsError):
        expand(overrides)


def test_slurm_jobs_ask_for_what_the_site_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PARTITION": "gpu", "ACCOUNT": "lab", "TIMELIMIT": "1440", "GPUS_PER_NODE": "4"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    config, _ = compose_launcher("slurm", ["hydra/launcher=slurm", "hydra.sweep.dir=grid", "hydra.launcher.nodes=2"])
    job = config.hydra.launcher
    assert (job.partition, job.account, job.timeout_min, job.gpus_per_node) == ("gpu", "lab", 1440, 4)
    assert (job.nodes, job.tasks_per_node, job.submitit_folder) == (2, 1, "grid/slurm/%j")
    overridden = ["hydra/launcher=slurm", "hydra.launcher.partition=long", "hydra.launcher.timeout_min=5"]
    job = compose_launcher("slurm", overridden)[0].hydra.launcher
    assert (job.partition, job.timeout_min) == ("long", 5)


def test_a_machine_that_cannot_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="hydra/launcher=slurm: no sbatch on this machine"):
        launch_through("slurm", ["hydra/launcher=slurm", "hydra.sweep.dir=grid"], ("-m", "adloco_dist.launch"))


def test_a_setting_that_the_launcher_does_not_know() -> None:
    with pytest.raises(SettingsError, match=r"hydra.launcher.minutes"):
        compose_launcher("slurm", ["hydra/launcher=slurm", "hydra.launcher.minutes=5"])
