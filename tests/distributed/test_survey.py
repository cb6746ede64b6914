"""What ranks find out about each other before training, and who of them tells a failure."""

import time
from pathlib import Path

import pytest
import torch

from adloco_dist.cluster.environment import Environment, Link, measure_links, survey
from adloco_dist.cluster.failures import failed
from adloco_dist.cluster.runtime import Place, Runtime, join_store
from adloco_dist.config import Backend
from helpers.processes import run_ranks


def offsets(runtime: Runtime) -> float:
    if runtime.rank == 2:
        real = time.time
        time.time = lambda: real() + 40.0
    return runtime.control.clock_offset_seconds()


def test_clocks_are_compared_with_rank_0() -> None:
    first, second, third = run_ranks(offsets, [0, 0, 1])
    assert first == 0.0
    assert abs(second) < 1.0
    assert third == pytest.approx(40.0, abs=1.0)


def survey_and_measure(runtime: Runtime) -> tuple[list[Environment], list[Link]]:
    return survey(runtime, Path.cwd()), measure_links(runtime, Backend.gloo, 4096, 60.0)


def test_all_ranks_know_every_environment_and_link() -> None:
    found = run_ranks(survey_and_measure, [0, 0, 1, 2])
    assert all(environments == found[0][0] and links == found[0][1] for environments, links in found)
    environments, links = found[0]
    assert [(one.rank, one.node) for one in environments] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert {one.torch for one in environments} == {torch.__version__}
    assert [link.nodes for link in links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.latency_seconds > 0 and link.bytes_per_second > 0 for link in links)


def fail_together(runtime: Runtime, directory: str) -> str:
    """Rank 1 fails by itself; the others fail for want of it, later, as when their sockets close."""
    store = join_store(Place(runtime.rank, runtime.world_size, 0, 1, 0, init_method=f"file://{directory}/store"))
    cause: Exception = ArithmeticError("of itself\nand a second line") if runtime.rank == 1 else RuntimeError("lost")
    cause.add_note("trainer 3")
    cause.add_note("round 2")
    if runtime.rank != 1:
        runtime.control.exchange({})
    detail = failed(cause, f"rank {runtime.rank}", store)
    if runtime.rank == 1:
        runtime.control.exchange({})
    return f"{type(detail).__name__}: {detail}"


def test_of_all_ranks_that_fail_one_tells_the_cause(tmp_path: Path) -> None:
    line = "rank 1, round 2, trainer 3: ArithmeticError: of itself"
    detail = run_ranks(fail_together, [0, 0, 0], str(tmp_path))
    assert detail == [f"PeerFailedError: {line}", f"RankFailedError: {line}", f"PeerFailedError: {line}"]
