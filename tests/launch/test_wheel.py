"""The installed wheel finds its config groups and trains, from any directory."""

import os
import subprocess
import sys
from pathlib import Path

from helpers.commands import ROOT, SMALL, environment, facts

PROGRAM = """
import adloco_dist
from adloco_dist.config.compose import compose
settings = compose(["algorithm=localsgd", "data=text", "data.train=[a]", "experiment=two_by_two", "tracking=none"])
print(adloco_dist.__file__, settings.outer.lr, settings.pool.workers_per_trainer)
print(settings.model.overrides["hidden_size"])
"""


def test_the_installed_wheel_finds_its_groups(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("adloco_dist-*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=empty, env=environment() | {"PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(site / "adloco_dist" / "__init__.py"), "1.0", "2", "128"]
    groups = {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    installed = {path.relative_to(site / "adloco_dist" / "conf") for path in (site / "adloco_dist").rglob("*.yaml")}
    assert installed == groups
    assert os.access(site / "bin" / "adloco-train", os.X_OK)

    trained = subprocess.run(
        [str(site / "bin" / "adloco-train"), *SMALL, "--nproc-per-node", "2", "run.directory=run"], cwd=empty,
        env=environment() | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert [path.name for path in empty.iterdir()] == ["run"]
    assert facts(empty / "run")["result"]["stop"] == "budget=3rounds reached"
    assert facts(empty / "run")["cluster"]["world_size"] == 2
