"""The commands for a GPU, tried out on a CPU: no case has gone stale, and none can take the others down with it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.commands import ROOT, run

TROUBLE = """
import os, signal, subprocess, threading
from harness import Case, SkippedError

def hang(here):
    subprocess.Popen(["sleep", "98765"], start_new_session=True)
    threading.Event().wait()

def crash(here):
    os.kill(os.getpid(), signal.SIGKILL)

def fail(here):
    assert here.is_cuda, "no GPU"

def skip(here):
    raise SkippedError("not here")

well = Case("well", lambda here: {"answer": 42.0}, alone=True)
CASES = [Case("hangs", hang, seconds=8), Case("crashes", crash), Case("fails", fail), Case("skips", skip), well]
"""
COMMAND = """
from checkout import checkout_on_path

if __name__ == "__main__":
    with checkout_on_path():
        from harness import main
        main("trouble", ["trouble"])
"""


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "gpu" / f"{name}.py"), *arguments]


def results(folder: Path) -> dict[str, Any]:
    machine, *lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    assert "torch" in machine["machine"]
    return {line["name"]: line for line in lines}


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = run(command("nccl"), tmp_path)
    assert (done.code, done.output.count("\n")) == (0, 1), done.output
    assert done.output.startswith("no GPU that torch ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("test", ["outer step as", "flash attention, eager", "checkpoint as of", "averages in every"]),
        ("nccl", ["collectives"]),
        ("bench", ["merge and regrouping"]),
    ],
)
def test_cases_pass_on_a_cpu_in_a_checkout_that_is_not_installed(tmp_path: Path, name: str, cases: list[str]) -> None:
    done = run(command(name, "--device", "cpu", "--out", "out", "--only", *cases), tmp_path)
    assert done.code == 0, done.output
    found = results(tmp_path / "out")
    assert len(found) == len(cases)
    for case in found.values():
        assert case["status"] == "passed" and case["figures"], case


def test_a_case_that_hangs_or_crashes_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    (tmp_path / "command.py").write_text(COMMAND)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.fspath(ROOT / "gpu"), os.fspath(tmp_path)]))
    done = run([sys.executable, "command.py", "--device", "cpu", "--out", "out"], tmp_path)
    assert done.code == 1, done.output
    found = results(tmp_path / "out")
    detail = {name: (case["status"], case["reason"]) for name, case in found.items()}
    assert detail["hangs"][0] == "failed" and detail["hangs"][1].startswith("still ran after 8 s")
    assert detail["crashes"][0] == "failed" and detail["crashes"][1].startswith("ended with code -9")
    assert detail["fails"] == ("failed", "AssertionError: no GPU")
    assert detail["skips"] == ("skipped", "not here")
    assert detail["well"] == ("passed", "") and found["well"]["figures"] == {"answer": 42.0}
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "98765"]]
    assert "1 passed, 3 failed, 1 skipped" in done.output


def test_cases_for_which_no_time_is_left_are_reported(tmp_path: Path) -> None:
    done = run(command("bench", "--device", "cpu", "--out", "out", "--seconds", "1"), tmp_path)
    assert done.code == 0, done.output
    assert {case["reason"] for case in results(tmp_path / "out").values()} == {"not run: time"}
