"""Every case is a test in a forked process of its own: one that hangs or crashes ends alone, at its time limit at most.

Processes are forked, for importing everything anew takes ten seconds and more; so pytest's own, and those of
pytest-xdist, must never start CUDA, nor compute. Commands and options are in harness.py.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkout import CASE
from harness import ASKED, Asked, Case, Here, Result, SkippedError
from helpers.commands import processes_with

RESULT_FILE = "result.json"
LEAST_SECONDS = 20.0
"""With less time left no further case is begun."""
FORK = multiprocessing.get_context("fork")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Those that share the device, the longest first, or the others in their order."""
    cases = Asked.from_environment().cases()
    metafunc.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run the case in a process of its own, and take over what became of it."""
    case = pyfuncitem.funcargs["case"]
    assert isinstance(case, Case)
    result = run_case(case, Asked.from_environment())
    pyfuncitem.user_properties.append(("result", asdict(result)))
    if result.status == "skipped":
        pytest.skip(result.reason)
    if result.status == "failed":
        pytest.fail(result.reason, pytrace=False)
    return True


class Results:
    """Writes the result of a case down as soon as it has ended, and shows it."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a case that was run, or could not be."""
        if (report.when == "setup" and report.passed) or report.when == "teardown":
            return
        name = report.nodeid.partition("[")[2].rstrip("]")
        crashed = Result(name, "failed", reason=str(report.longrepr)[:300])
        result = Result(**dict(report.user_properties).get("result", asdict(crashed)))
        with (Asked.from_environment().out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(f"{result.name}: {result.status} after {result.seconds:.0f} s\n  {result.in_words()}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes the one that all reports come to writes them down."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results())


def run_case(case: Case, asked: Asked) -> Result:
    """What a case left, or why there is nothing; it is over then."""
    start, folder = time.monotonic(), asked.out / re.sub(r"\W+", "-", case.name)
    left = asked.deadline - time.time()
    if left < LEAST_SECONDS:
        return Result(case.name, "skipped", reason="not run: time")
    folder.mkdir()
    process = FORK.Process(target=_run_here, args=(case, asked.device, folder))
    process.start()
    process.join(min(case.seconds, left))
    has_ended = not process.is_alive()
    assert process.pid is not None
    # Its session, and what has left that; those were started with its variable.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have had its session yet
    for left_over in processes_with(CASE, case.name):
        with suppress(psutil.Error):
            left_over.kill()
    process.join()
    seconds = round(time.monotonic() - start, 1)
    if (folder / RESULT_FILE).exists():
        return Result(**json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    if not has_ended and left < case.seconds:
        return Result(case.name, "skipped", seconds, reason="not run to its end: time")
    how = f"ended with code {process.exitcode}, without a result"
    how = how if has_ended else f"still ran after {seconds:.0f} s"
    lines = (folder / "output.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return Result(case.name, "failed", seconds, reason=f"{how}; the last line: {lines[-1] if lines else 'none'}")


def _run_here(case: Case, device: str, folder: Path) -> None:
    """Run a case in this process, which was forked for it, and leave its result in its folder."""
    os.setsid()
    os.environ.update({CASE: case.name, **case.environment})
    with (folder / "output.log").open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not those that pytest captures
    start = time.monotonic()
    figures: Mapping[str, float] = {}
    status, reason = "passed", ""
    try:
        figures = case.run(Here(torch.device(device, 0), folder))
    except SkippedError as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:  # whatever it is
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}"
    result = Result(case.name, status, round(time.monotonic() - start, 1), dict(figures), reason)
    (folder / RESULT_FILE).write_text(json.dumps(asdict(result)), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread or a process group that hangs has been judged already


assert ASKED in os.environ, "start it by gpu/test.py, gpu/nccl.py or gpu/bench.py"
