"""For all tests.

No GPU is seen here, on machines that have some: the commands would start one rank on each, where these tests count on
what they do without, and results on the CPU are compared to the last bit. What needs a GPU is checked by gpu/test.py.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

gc.disable()  # until all is imported that tests import: each of several processes does

from helpers import browser, hosts, images, slurm  # noqa: E402

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks CUDA, which looks once

# Tests run side by side, each with as many threads as there are cores. Threads that spin while they wait for each other
# would take the cores from those that they wait for: four small runs took 150 s so, and take 7 s.
os.environ["OMP_WAIT_POLICY"] = "passive"

# Commands that the tests start inherit what is ignored here: under nohup, or in the background of a script, they would
# not hear of the signals that are tried on them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def why_missing(package: str) -> str | None:
    """Why a package cannot be used; None: it is installed."""
    return None if find_spec(package) else f"{package} is not installed"


OBSTACLES: dict[str, Callable[[], str | None]] = {
    "root": lambda: None if os.geteuid() == 0 else "mounting a file system needs root",
    "user": lambda: "root may read every file" if os.geteuid() == 0 else None,
    "hosts": hosts.why_unavailable,
    "far": hosts.why_not_far,
    "slurm": slurm.why_unavailable,
    "browser": browser.why_unavailable,
    "image": images.why_unavailable,
    **{name: partial(why_missing, name) for name in ("accelerate", "lightning", "peft", "trl")},
}
"""By what `pytest.mark.needs` names: why this machine has not got it; None if it has."""


@cache
def obstacle(need: str) -> str | None:
    return OBSTACLES[need]()


LONGEST_FIRST = (
    "launch/test_image", "distributed/test_resume", "cluster/test_slurm", "launch/test_failures",
    "cluster/test_elastic", "distributed/test_read_when", "launch/test_train", "launch/test_interrupted",
    "cluster/test_sharded_hosts", "launch/test_report", "launch/test_corpora", "cluster/test_two_hosts",
    "launch/test_guides", "distributed/test_regrouping", "launch/test_sweep", "distributed/test_sharded",
)  # fmt: skip
"""Files that take longest begin first, so that none of them is left over at the end. Those that wait (for an image, a
cluster, a host that is lost) alternate with those that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of LONGEST_FIRST, then those that start processes, then the others."""
    folders = ("launch", "cluster", "distributed")

    def place(item: pytest.Item) -> tuple[int, int]:
        file = item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
        rank = LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)
        return rank, file.split("/")[0] not in folders

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        if reason := obstacle(*marker.args):
            pytest.skip(reason)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
