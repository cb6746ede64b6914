"""The scripts of the guides, run as they are written there."""

import sys
from pathlib import Path

from helpers.commands import ROOT, facts, run

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def script(page: str, directory: Path) -> str:
    """Write the first Python block of a guide to a file of `directory`."""
    text = (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8")
    path = directory / "my_script.py"
    path.write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    return str(path)


def test_the_own_loop_runs_on_two_ranks(tmp_path: Path) -> None:
    path = script("own-loop.md", tmp_path)
    done = run([sys.executable, *TWO_RANKS, path], tmp_path)
    assert done.code == 0, done.output
    rounds = [line.partition(":")[0] for line in done.output.splitlines() if line.startswith("round ")]
    assert rounds == [f"round {number}" for number in range(1, 9)], done.output


def test_the_noise_scale_is_printed_with_every_measurement(tmp_path: Path) -> None:
    path = script("noise-scale.md", tmp_path)
    done = run([sys.executable, path], tmp_path)
    assert done.code == 0, done.output
    assert [line for line in done.output.splitlines() if line.startswith("noise scale ")] == done.output.splitlines()
    assert done.output.count("\n") == 10, done.output


def test_an_own_model_trains_in_the_launcher(tmp_path: Path) -> None:
    path = script("own-model.md", tmp_path)
    settings = ("pool.trainers=2", "pool.workers_per_trainer=2", "budget=rounds", "budget.rounds=3", "tracking=none")
    done = run([sys.executable, path, "--nproc-per-node", "2", *settings, "run.directory=run"], tmp_path)
    assert done.code == 0, done.output
    assert facts(tmp_path / "run")["result"]["stop"] == "budget.rounds=3 reached"
