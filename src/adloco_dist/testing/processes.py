"""Distributed tests with real processes: the same function on several gloo ranks, forked in a fraction of a second."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from adloco_dist.cluster.runtime import Place, Runtime, started
from adloco_dist.config import ClusterSettings, Device

TIMEOUT_SECONDS = 120.0

# Children are forked from a server that imported torch but never ran a tensor operation: a process that did would
# hand them a thread pool without its threads, and they would hang at their first parallel operation.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["adloco_dist.train"])


def run_ranks(function: Callable[..., Any], nodes: list[int], *arguments: Any) -> list[Any]:
    """Call `function(runtime, *arguments)` on len(nodes) ranks at once; their return values by rank.

    Args:
        function: at module level, as children import it.
        nodes: which node each rank believes to stand on.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or if ranks do not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{Path(directory) / 'rendezvous'}"
        pipes, ranks = [], []
        for rank, node in enumerate(nodes):
            receiver, sender = _processes.Pipe(duplex=False)
            place = Place(rank, len(nodes), rank, len(nodes), node, init_method=store)
            process = _processes.Process(target=_run_rank, args=(sender, place, function, arguments), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            ranks.append(process)
        try:
            results = [_receive(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    failures = [error for _, error in results if error]
    assert not failures, failures[0]
    return [result for result, _ in results]


def _receive(rank: int, pipe: Connection) -> tuple[Any, str | None]:
    assert pipe.poll(TIMEOUT_SECONDS), f"rank {rank} did not end within {TIMEOUT_SECONDS} s"
    try:
        return pipe.recv()
    except EOFError:
        return None, f"rank {rank} died"


def _run_rank(pipe: Connection, place: Place, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    cluster = ClusterSettings(device=Device.cpu, threads_per_rank=1, control_seconds=60, outer_seconds=60)
    try:
        with started(cluster, place) as runtime:
            result = function(runtime, *arguments)
        pipe.send((result, None))
    except Exception:  # reported to the test, whatever it is
        pipe.send((None, f"rank {place.rank}:\n{traceback.format_exc()}"))


__all__ = ["Runtime", "run_ranks"]
