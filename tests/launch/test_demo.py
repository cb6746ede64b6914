"""The demonstration, as a newcomer starts it."""

import json
import re
import sys
from pathlib import Path

from adloco_dist.launch.demo import ALONE, DDP, TOGETHER
from helpers.commands import ROOT, run


def test_the_demonstration_compares_three_runs_and_says_what_comes_next(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "demo.py"), "budget=1.5seconds", "evaluation.sequences=16"]
    done = run(command, tmp_path)
    assert done.code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {TOGETHER, ALONE, DDP, "figures"}
    for name in (TOGETHER, ALONE, DDP):
        assert json.loads((folder / name / "run.json").read_text())["result"]["saved"] == "trainer 0"
    losses = re.search(
        r"^validation loss after [\d.]+ s of that clock: two machines ([\d.]+), one alone ", done.output, re.M
    )
    assert losses and float(losses[1]) < 6
    assert f"page: runs/{folder.name}/report.html" in done.output
    assert (folder / "report.html").is_file()
    assert "next: python launch/generate.py runs/" in done.output
