"""A run that is repeated by its plans is the same to the bit, whatever the clock has decided in it."""

import hashlib
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from helpers.clocks import without_clocks
from helpers.commands import errors, facts, metrics, run, running, slow_down, small_without, train_command, wait_until

SETTINGS = (*small_without("budget", "evaluation.every"), "budget=12seconds", "checkpoint.every=7rounds")
"""Rounds, batches, rates, evaluations and the end follow the clock; so do updates, as the second rank is slow."""


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_what_a_clock_has_decided_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was stopped in the middle of a round and resumed."""
    (tmp_path / "slow").mkdir()
    first = train_command(*SETTINGS, "run.directory=run", "run.unfinished=resume")
    with monkeypatch.context() as slow:
        slow.setenv("PYTHONPATH", slow_down(tmp_path / "slow", rank=1, factor=3))
        with running(first, tmp_path, "LlamaForCausalLM") as (process, output):
            records = tmp_path / "run" / "metrics.jsonl"
            wait_until(lambda: records.exists() and records.read_bytes().count(b"\n") > 12, lambda: output)
            process.send_signal(signal.SIGINT)
            output += process.communicate(timeout=120)[0]
        assert "stopped: interrupted" in output
        done = run(first, tmp_path)
    assert done.code == 0, done.output
    assert "note: resumes from run/checkpoints/" in done.output
    rows = metrics(tmp_path / "run")
    assert len({tuple(row["worker_updates"]) for row in rows if row["round"]}) > 1, "there is something to repeat"

    again = run(train_command(*SETTINGS, "run.directory=again", "run.replay=run"), tmp_path)
    assert again.code == 0, again.output
    assert digest(tmp_path / "again") == digest(tmp_path / "run")
    first_rows, again_rows = without_clocks(rows), without_clocks(metrics(tmp_path / "again"))
    (stopped_in,) = re.findall(r"stopped: interrupted in round (\d+)", output)
    for row in (*first_rows, *again_rows):
        if row["round"] == int(stopped_in):  # of the averages that were completed before the stop nothing is reported
            row.pop("pseudo_gradient_norm", None)
    assert again_rows == first_rows
    assert facts(tmp_path / "again")["result"]["stop"] == facts(tmp_path / "run")["result"]["stop"]

    following = [shlex.split(line) for line in re.findall(r"^next: (.*)$", again.output, re.M)]
    assert [(words[0], Path(words[1]).name, words[2]) for words in following] == [
        (sys.executable, "evaluate.py", "again"),
        (sys.executable, "generate.py", "again"),
    ]
    assert all(Path(words[1]).is_file() for words in following)

    other = run(train_command(*SETTINGS, "run.directory=other", "run.replay=run", "seed=5"), tmp_path)
    assert other.code == 2
    (line,) = errors(other.output)
    assert line.startswith("error: seed=5: the run in run.replay=run had 0; give it the same")
    assert not (tmp_path / "other").exists()
