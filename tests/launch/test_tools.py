"""Every tool of launch/ as a process of its own: a mistake is one line, and it ends with 2 (`use` tries the rest)."""

from pathlib import Path

import pytest

from helpers.commands import ROOT, errors, run, tool

MISTAKES = {
    "demo.py": ["inner.lrr=1"],
    "evaluate.py": ["nowhere"],
    "generate.py": ["nowhere", "text"],
    "report.py": ["nowhere"],
    "watch.py": ["nowhere"],
    "analyze_gradients.py": ["nowhere", "--nproc-per-node", "0"],
    "check.py": ["--nproc-per-node", "0"],
    "check_data.py": ["--samples", "-1"],
    "tokenize_corpus.py": ["out", "--processes", "0"],
}


def test_every_tool_is_here() -> None:
    assert {path.name for path in (ROOT / "launch").glob("*.py")} == {*MISTAKES, "train.py"}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, tmp_path: Path) -> None:
    done = run(tool(name, *MISTAKES[name]), tmp_path)
    assert done.code == 2, done.output
    (line,) = errors(done.output)
    assert done.output == f"{line}\n"
    assert list(tmp_path.iterdir()) == []
