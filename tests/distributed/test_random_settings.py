"""Whether random command lines either train or are refused in one line: the bench that tries 500 of them, on a few."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.commands import ROOT


def test_random_command_lines_train_or_are_refused(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    bench = [sys.executable, str(ROOT / "bench" / "survive.py"), "--only", "configs", "--count", "9"]
    done = subprocess.run([*bench, "--json", str(figures)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tried = json.loads(figures.read_text())["figures"]
    assert tried["configs_failed"] == 0, done.stdout
    assert tried["configs_tried"] == 9
    assert tried["configs_trained"] >= 1
