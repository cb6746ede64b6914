"""Distributed tests with real processes: the same function on several ranks, on the CPU forked in 0.1 s."""

import faulthandler
import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from adloco_dist.cluster.runtime import Place, join_store, started
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import ClusterSettings, Device

TIMEOUT_SECONDS = 120.0
CPU_RANKS = ClusterSettings(device=Device.cpu, threads_per_rank=1, timeout_seconds=60)

# Children are forked from a server that has imported these, but has never run a tensor operation: a process that has
# would hand them a thread pool without its threads, and they would hang at their first parallel operation.
PRELOADED = [
    *(f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama")),
    "adloco_dist.config.compose",
    "adloco_dist.train",
    "helpers.preloaded",
]
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(PRELOADED)
# CUDA does not work in the child of a process that has as much as counted the GPUs.
_spawned = multiprocessing.get_context("spawn")


def run_ranks(
    function: Callable[..., Any], nodes: list[int], *arguments: Any, cluster: ClusterSettings = CPU_RANKS,
    timeout_seconds: float = TIMEOUT_SECONDS, ranks_per_worker: int = 1,
) -> list[Any]:  # fmt: skip
    """Call `function(runtime, *arguments)` on len(nodes) ranks at once; their return values by rank.

    Args:
        function: one at module level, as children import it.
        nodes: which node each rank believes to stand on.
        cluster: the device and the backend, with the timeouts; ranks on GPUs are spawned, which takes seconds.
        timeout_seconds: how long no rank may end.
        ranks_per_worker: neighbouring ranks that hold a worker together.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or if ranks do not end in time.
    """
    processes_of = forked if cluster.device is Device.cpu else _spawned
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{Path(directory) / 'rendezvous'}"
        pipes: dict[Connection, int] = {}
        processes = []
        for rank, node in enumerate(nodes):
            receiver, sender = processes_of.Pipe(duplex=False)
            place = Place(rank, len(nodes), rank, len(nodes), node, init_method=store)
            process = processes_of.Process(
                target=_run_rank, args=(sender, place, cluster, ranks_per_worker, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: dict[Connection, int], processes: Sequence[BaseProcess], timeout_seconds: float) -> list[Any]:
    """The results by rank; the first failure ends the wait for the others, which may hang without that rank."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(waiting, timeout=timeout_seconds)
        assert ready, f"ranks {[pipes[pipe] for pipe in waiting]} did not end within {timeout_seconds:g} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                results[pipes[pipe]], failure = pipe.recv()
            except EOFError:
                died = processes[pipes[pipe]]
                died.join()
                failure = f"rank {pipes[pipe]} died with code {died.exitcode}"
            assert failure is None, failure
    return [results[rank] for rank in sorted(results)]


def _run_rank(
    pipe: Connection, place: Place, cluster: ClusterSettings, ranks_per_worker: int, function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    faulthandler.enable()  # a signal that ends the process leaves what it was doing
    gc.freeze()  # otherwise the first collections would look through everything that the server has imported
    try:
        with started(cluster, place, join_store(place), StopRequest(), ranks_per_worker) as runtime:
            result = function(runtime, *arguments)
        pipe.send((result, None))
    except Exception:  # reported to the test, whatever it is
        pipe.send((None, f"rank {place.rank}:\n{traceback.format_exc()}"))
