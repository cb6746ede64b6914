"""A user's script that calls `launch` is a full launcher, for items and for streams."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from adloco_dist.config import SettingsError
from adloco_dist.setup.parts import OwnParts
from helpers.clocks import without_clocks
from helpers.commands import ROOT, errors, facts, metrics, run, running, tool, use

SCRIPT = ROOT / "tests" / "helpers" / "own_script.py"
MERGING = (
    "algorithm=diloco", "batching.request=norm_test",
    "pool.trainers=3", "pool.workers_per_trainer=1", "algorithm.updates_per_round=8",
    "merge.every_rounds=4", "budget=30rounds", "evaluation.every=10rounds", "checkpoint.every=1rounds",
    "run.directory=run", "run.unfinished=resume", "tracking=none", "run.report=false",
)  # fmt: skip
ALONE = (
    "algorithm=diloco", "pool.trainers=1", "pool.workers_per_trainer=1", "merge=none", "tracking=none",
    "run.report=false", "cluster.threads_per_rank=1",
)  # fmt: skip


def own_command(*arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *arguments]


@pytest.mark.parametrize("kind", ["items", "streams"])
def test_it_learns_merges_and_resumes_as_if_it_had_never_been_killed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = MERGING
    if kind == "streams":
        monkeypatch.setenv("STREAM", "1")
        more = ("--nproc-per-node", "1", *MERGING)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    done = run(own_command(*more), whole)
    assert done.code == 0, done.output
    with running(own_command(*more), killed, until="round 7 ") as (process, _):
        process.kill()
    again = run(own_command(*more), killed)
    assert again.code == 0, again.output
    assert "note: resumes from run/checkpoints/" in again.output

    rows = [without_clocks(metrics(folder / "run")) for folder in (whole, killed)]
    assert rows[0] == rows[1]
    models = [load_file(folder / "run" / "model" / "model.safetensors") for folder in (whole, killed)]
    assert models[0].keys() == models[1].keys()
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    found = facts(whole / "run")
    assert found["command"].split()[0] == "own_script.py"
    assert len(found["merges"]) == 2
    validation = [row["validation_loss"] for row in rows[0] if "validation_loss" in row]
    assert validation[-1] < 0.5 * validation[0]
    assert {row["total_batch"] for row in rows[0] if row["round"] == 1} != {
        row["total_batch"] for row in rows[0] if row["round"] == 30
    }


def test_a_stop_in_the_middle_of_a_round_is_resumed_there(tmp_path: Path) -> None:
    fixed = ("batching.request=none", "batching.local_batch=2", "evaluation.every=null")
    more = ("algorithm.updates_per_round=5000", "budget=2rounds", *fixed, *ALONE)
    with running(own_command(*MERGING, *more), tmp_path, until="note: computes") as (process, _):
        (tmp_path / "run" / "stop").touch()
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert "stopped: interrupted in round 1" in output
    again = run(own_command(*MERGING, *more), tmp_path)
    assert again.code == 0, again.output
    assert facts(tmp_path / "run")["result"]["rounds"] == 2


def test_a_sweep_of_two(tmp_path: Path) -> None:
    swept = ("-m", "inner.lr=1e-3,1e-2", "budget=2rounds", "hydra.sweep.dir=sweep", *ALONE)
    done = run(own_command(*swept), tmp_path)
    assert done.code == 0, done.output
    results = [facts(folder)["result"] for folder in sorted(tmp_path.glob("sweep/inner*/"))]
    first, second = (result["candidates"][0]["validation_loss"] for result in results)
    assert first != second


def test_a_dry_run_knows_the_model(tmp_path: Path) -> None:
    done = run(own_command("--dry-run"), tmp_path)
    assert done.code == 0, done.output
    assert done.output.startswith("model: 674 parameters")
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = run(own_command("model=tiny"), tmp_path)
    assert done.code == 2
    (line,) = errors(done.output)
    assert line.startswith("error: model=tiny: has no effect, because own_script.py brings its own model")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingsError, match=r"data.train=\[x.txt\]: has no effect, because .* brings its own data"):
        OwnParts(dict, dict, divmod).compose(["data.train=[x.txt]"])


def test_tools_that_need_a_model_of_transformers_refuse(tmp_path: Path) -> None:
    done = run(own_command("--nproc-per-node", "1", "budget=1rounds", "run.directory=run", *ALONE), tmp_path)
    assert done.code == 0, done.output
    # A process of its own for what ends its process.
    for refused in (use("evaluate.py", "run", cwd=tmp_path), run(tool("analyze_gradients.py", "run"), tmp_path)):
        assert refused.code == 2, refused.output
        (line,) = errors(refused.output)
        assert "has no config.json" in line
