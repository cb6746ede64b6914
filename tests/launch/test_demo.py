"""The demonstration, as a newcomer starts it."""

import json
import re
import shlex
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
    figures = r"two machines ([\d.]+), one alone ([\d.]+), DistributedDataParallel ([\d.]+)$"
    losses = re.search(rf"^validation loss after [\d.]+ s of that clock: {figures}", done.output, re.M)
    assert losses and max(map(float, losses.groups())) < 6
    when = r"([\d.]+ s|not in that time)"
    to_loss = rf"^to a loss of [\d.]+: two machines {when}, one alone [\d.]+ s, DistributedDataParallel {when}$"
    assert re.search(to_loss, done.output, re.M)
    assert f"page: runs/{folder.name}/report.html" in done.output
    assert (folder / "report.html").is_file()
    *_, command = re.findall(r"^next: (.*)$", done.output, re.M)
    python, script, *words = shlex.split(command)
    assert python == sys.executable
    again = run([python, str(ROOT / script), *words, "--tokens", "5"], tmp_path)
    assert again.code == 0, again.output
    assert again.output.startswith("def main(")
