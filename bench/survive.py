"""Does a run outlive its processes and its user? Kills, lost nodes, damage, settings, clumsiness, and at what cost.

The tests of tests/chaos and those marked `stranger`, run part by part, and what checkpoints and lost members cost.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from common import parse, report
from cost_of_checkpoints import measure_cost
from cost_of_members import measure_members

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"cost": 8, "damage": 200, "configs": 500, "kills": 50, "nodes": 5, "links": 20, "rim": 1000, "strangers": 1,
          "members": 10, "churn": 20}  # fmt: skip
"""By part: starts, damages, command lines, kills, losses of each kind, cuts of links, cases (all there are), the one
run of the tests that are marked as strangers', events of each kind, and events."""
QUICK = {"cost": 1, "damage": 200, "configs": 40, "kills": 4, "nodes": 1, "links": 0, "rim": 20, "strangers": 0,
         "members": 2, "churn": 0}  # fmt: skip


def run_tests(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pytest", "--tb=short", *arguments]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, stdout=sys.stderr, check=False)


def measure_chaos(part: str, count: int, seed: int, named: str) -> dict[str, float]:
    """The figures of one test of tests/chaos, which prints what is wrong; none where it cannot be run here.

    Args:
        named: of the rim, only cases whose names contain it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        asked = {"CHAOS_COUNT": str(count), "CHAOS_SEED": str(seed), "CHAOS_CASE": named, "CHAOS_FIGURES": str(file)}
        run_tests("tests/chaos/test_chaos.py", "-m", "chaos", "-s", "-k", f"test_{part}", **asked)
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def measure_strangers() -> dict[str, float]:
    """Run the tests that are marked `stranger`: how many there are, and how many of these do not come out right."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        run_tests("tests", "-m", "stranger", "-n", "4", "--dist", "loadfile", f"--junitxml={results}")
        suite = next(ElementTree.parse(results).iter("testsuite"))
    count, skipped, failures, errors = (int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors"))
    return {"strangers": count - skipped, "strangers_wrong": failures + errors, "strangers_skipped": skipped}


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=COUNTS, help="one part of it")
    parser.add_argument("--count", type=int, help=f"with --only: how many (default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--case", default="", metavar="TEXT", help="with --only rim: cases whose names contain it")
    options = parser.parse_args()
    if options.count is not None and (options.only in (None, "strangers") or options.count < 1):
        parser.error(f"--count={options.count}: must be >= 1, of a part other than strangers (--only)")
    if options.case and options.only != "rim":
        parser.error(f"--case={options.case}: needs --only rim")
    counts = QUICK if options.quick else COUNTS
    if options.only:
        count = options.count or counts[options.only] or COUNTS[options.only]
        counts = {options.only: count}
    figures: dict[str, float] = {}
    rows: list[list[str]] = []
    for part, count in counts.items():
        if part == "cost" and count:
            cost, rows = measure_cost(count)
            figures |= cost
        elif part == "members" and count:
            figures |= measure_members(count)
        elif part == "strangers" and count:
            figures |= measure_strangers()
        elif count:
            figures |= measure_chaos(part, count, options.seed, options.case)
    rows += [[name, f"{value:.4g}"] for name, value in figures.items() if not name.startswith("checkpoint")]
    report("survival, 2 ranks (nodes: 3 hosts)", ["", "measured"], rows, figures, options.json)


if __name__ == "__main__":
    main()
