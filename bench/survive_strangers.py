"""What loops, corpora, tokenizers and machines of others bring: the tests that are marked so, counted."""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]


def measure_strangers() -> dict[str, float]:
    """Run the tests that are marked `stranger`: how many there are, and how many of these do not come out right."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "tests", "-m", "stranger", "-n", "4", "--dist", "loadfile"]
        subprocess.run([*command, f"--junitxml={results}"], cwd=ROOT, stdout=sys.stderr, check=False)
        suite = next(ElementTree.parse(results).iter("testsuite"))
    count, skipped, failures, errors = (int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors"))
    return {"strangers": count - skipped, "strangers_wrong": failures + errors, "strangers_skipped": skipped}
