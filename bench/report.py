"""What a report takes to write for a very long run, and what it costs a run that its page is open while it trains.

The long run has the rows of a real one of four trainers, again and again, with rounds, clock and tokens that continue.
The live page is open in turns: a client asks for all that the page asks for, when it asks for it, and draws nothing,
for that happens on the machine of whoever looks.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import median_ratio, parse, report, spread

ROOT = Path(__file__).parent.parent
ROUNDS, TRAINERS = 100_000, 4
COUNTED = ("round", "elapsed_seconds", "pool_tokens")
Rows = list[Sequence[str]]
ADDRESS = re.compile(r"http://\S+/")
PAGE_SECONDS = 5.0
"""Between two questions of the page: LIVE_SECONDS in report/page.js."""
SHARED = ("tracking=none", "run.report=false", "evaluation.every=null", "batching.request=none", "merge=none")


def main() -> None:
    options = parse("Time and size of the report of a long run; what watching a run costs it.").parse_args()
    figures: dict[str, float] = {}
    rows = [
        *long_report(figures, repetitions=1 if options.quick else 5),
        *watching(figures, pairs=3 if options.quick else 20, seconds=10 if options.quick else 20),
    ]
    report("run report", ("what", "min", "median", "max"), rows, figures, options.json)


def long_report(figures: dict[str, float], repetitions: int) -> Rows:
    """Write the page and the pictures of a run of many rounds, as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        pool = (f"pool.trainers={TRAINERS}", "pool.workers_per_trainer=1", "model=nano")
        budget = ("budget=20rounds", f"run.directory={run}")
        command = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "4"]
        subprocess.run([*command, *SHARED, *pool, *budget], check=True, capture_output=True)
        num_bytes = prolong(run)
        seconds = [
            seconds_of([sys.executable, str(ROOT / "launch" / "report.py"), str(run)]) for _ in range(repetitions)
        ]
        size = (run / "report.html").stat().st_size
    figures |= {"report_seconds": statistics.median(seconds), "report_mb": size / 1e6}
    return [
        ("records, MB", "", f"{num_bytes / 1e6:,.0f}", ""),
        ("report and pictures, s", *spread(seconds)),
        ("report.html, MB", "", f"{size / 1e6:.2f}", ""),
    ]


def prolong(run: Path) -> int:
    """Make a run of ROUNDS rounds of one of a few; return the bytes of its records."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [row for row in rows if row["round"]]
    last = {name: max(row[name] for row in trained) for name in COUNTED}
    with path.open("w") as file:
        for row in rows[:TRAINERS]:
            file.write(json.dumps(row) + "\n")
        for repetition in range(ROUNDS // last["round"]):
            for row in trained:
                counted = {name: row[name] + repetition * last[name] for name in COUNTED}
                file.write(json.dumps(row | counted) + "\n")
    return path.stat().st_size


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def watching(figures: dict[str, float], pairs: int, seconds: float) -> Rows:
    """Tokens per second of one run on two ranks, in stretches in which its page is open and in which it is not."""
    opened, closed, renewals = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        rounds = ("algorithm=diloco", "algorithm.updates_per_round=10", "checkpoint.every=null")
        budget = ("budget=1000000rounds", f"run.directory={run}", "run.watch=0")
        command = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "2"]
        process = subprocess.Popen(
            [*command, *SHARED, *rounds, *budget], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            address = found_address(process)
            threading.Thread(target=process.communicate, daemon=True).start()
            stretch(run, seconds, lambda: None)
            for pair in range(pairs):
                for is_open in (pair % 2 == 0, pair % 2 == 1):
                    client = Client(address, seconds)
                    rate = stretch(run, seconds, client.show if is_open else lambda: None)
                    (opened if is_open else closed).append(rate)
                    renewals += client.renewals
        finally:
            process.terminate()
            process.wait()
    figures["watch_cost"] = median_ratio(opened, closed)
    return [
        ("tokens/s, page open", *spread(opened)),
        ("tokens/s, not open", *spread(closed)),
        ("times that the page was renewed", "", str(renewals), ""),
    ]


def found_address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := ADDRESS.search(line):
            return found[0]
    raise RuntimeError("the run has named no address")


def stretch(run: Path, seconds: float, act: Callable[[], object]) -> float:
    """Tokens per second of the run while something else is done, by the clock of its own records."""
    before, end = last_row(run), time.monotonic() + seconds
    act()
    time.sleep(max(0.0, end - time.monotonic()))
    after = last_row(run)
    return (after["pool_tokens"] - before["pool_tokens"]) / (after["elapsed_seconds"] - before["elapsed_seconds"])


def last_row(run: Path) -> dict[str, Any]:
    path = run / "metrics.jsonl"
    while not path.exists() or b'"pool_tokens"' not in path.read_bytes():
        time.sleep(0.1)
    return json.loads(path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2])


@dataclass
class Client:
    """Somebody who has the page open for some seconds."""

    address: str
    seconds: float
    renewals: int = 0
    """How often its state was new."""

    def show(self) -> None:
        """Ask for what an open page asks for."""
        end, version = time.monotonic() + self.seconds, ""
        for name in ("", "vega.js"):
            ask(self.address + name)
        while time.monotonic() < end - PAGE_SECONDS:
            time.sleep(PAGE_SECONDS)
            state = json.loads(ask(f"{self.address}state"))
            self.renewals += state["version"] != version
            version = state["version"]


def ask(address: str) -> bytes:
    with urllib.request.urlopen(address) as answer:
        return answer.read()


if __name__ == "__main__":
    main()
