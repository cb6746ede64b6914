"""torchrun's agent for this node, in this process: it starts the ranks, stops them when asked, and says what failed."""

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import psutil
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from adloco_dist.cluster.failures import LostContactError, PeerFailedError, RankFailedError
from adloco_dist.cluster.signals import STOP_SIGNALS, act_on_signals
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR
from adloco_dist.launch.exit_codes import AGENT, OUTCOME, end_driver, highest_noted_code
from adloco_dist.launch.rendezvous import Rendezvous
from adloco_dist.launch.rendezvous_watch import watch_rendezvous
from adloco_dist.terminal import report_error
from adloco_dist.text import first_line

ASK = signal.SIGUSR1
"""Asks a rank to stop. It silently ends a rank that does not listen yet, as the next one does."""
ASK_TO_LEAVE = signal.SIGUSR2
"""Asks it to leave the run to other nodes."""
WITHOUT_CHECKPOINT = "stopped: a rank ended before it had written a checkpoint; the last one counts"
END_SECONDS = 30
"""How long an agent whose ranks have ended waits for the agents of other nodes: all ranks end together."""


def start_ranks(
    rendezvous: Rendezvous, num_ranks: int, arguments: Sequence[str], can_stop: bool = True, can_leave: bool = False
) -> NoReturn:
    """Run the interpreter with `arguments` as every rank of this node, until all nodes are done, and end as they did.

    Args:
        can_stop: ranks that are asked to stop write a checkpoint first; others are ended at once.
        can_leave: ranks of other nodes go on without this one, unless somebody at its terminal wants an end.
    """
    # What failed is reported below, in one line, which the records of the agent's own loggers would bury.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if rendezvous.num_nodes > 1:
        watch_rendezvous(rendezvous)
    stopping = _Stopping(can_stop, can_leave)
    act_on_signals((*STOP_SIGNALS, signal.SIGQUIT), stopping.act)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    if rendezvous.max_restarts > 0:
        # Else the agents would continue with the store of their first start, on a node that may be gone.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    end_driver(_followed(rendezvous, num_ranks, ("-u", *arguments), stopping))


def _followed(rendezvous: Rendezvous, num_ranks: int, arguments: tuple[str, ...], stopping: "_Stopping") -> int:
    """Start the ranks, wait until all nodes are done, and say what failed; the exit code."""
    with tempfile.TemporaryDirectory(prefix="adloco-") as folder:
        notes = Path(folder) / "outcome"
        notes.mkdir()
        os.environ[OUTCOME], os.environ[AGENT] = str(notes), str(os.getpid())
        try:
            failures = _run_agent(rendezvous, num_ranks, arguments, Path(folder) / "agent", stopping)
        except _StoppedError:
            report_error(WITHOUT_CHECKPOINT)
            return EXIT_STOPPED
        except RendezvousError as error:
            return _without_rendezvous(rendezvous, error, ranks_were_up=any(notes.iterdir()))
        if failures:
            return EXIT_STOPPED if stopping.explains(failures) else report_cause(failures)
        return highest_noted_code(notes)


def _run_agent(
    rendezvous: Rendezvous, num_ranks: int, arguments: tuple[str, ...], folder: Path, stopping: "_Stopping"
) -> Mapping[int, ProcessFailure]:
    """Start the ranks and wait for them, as torchrun does; their failures by rank.

    torch's own launcher would close the rendezvous where this node has lost contact: the others still use it.

    Raises:
        RendezvousError: nodes did not come together, or the store is gone.
        _StoppedError: ranks would have to start again, but were asked to stop.
    """
    # "none" names no signal: the agent would give ranks 30 seconds, and then kill them in the middle of their round.
    # They are in sessions of their own, out of the terminal's reach.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=rendezvous.endpoint,
            run_id=rendezvous.job or uuid.uuid4().hex,
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.num_nodes,
            local_addr=rendezvous.address,
            join_timeout=rendezvous.timeout_seconds,
            read_timeout=rendezvous.timeout_seconds,
        )
    )
    spec = WorkerSpec(
        role="default_role",
        local_world_size=num_ranks,
        rdzv_handler=cast(RendezvousHandler, _RendezvousUntilStopped(handler, stopping)),
        entrypoint=sys.executable,
        args=arguments,
        max_restarts=rendezvous.max_restarts,
        local_addr=rendezvous.address,
    )
    result: Any = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(folder)), exit_barrier_timeout=END_SECONDS).run()
    handler.shutdown()
    return result.failures if result else {}  # none: the others have no room for this node


def _without_rendezvous(rendezvous: Rendezvous, error: RendezvousError, ranks_were_up: bool) -> int:
    """Print why the nodes are not together; the exit code."""
    endpoint, host = rendezvous.endpoint, socket.gethostname()
    if not ranks_were_up:
        wanted = f"{rendezvous.wanted} within {rendezvous.timeout_seconds} s"
        remedy = "start the same command on every node, and check that this host and port can be reached from all"
        reason = first_line(error.__cause__ or error)
        report_error(f"error: --rdzv-endpoint={endpoint}: did not bring together {wanted} ({reason}); {remedy}")
        return EXIT_FAILURE
    # The agent that holds the store ended first, and reports the cause.
    report_error(f"ended on {host}: the agent at {endpoint} is gone; see what it says")
    return EXIT_FAILURE


@dataclass
class _Stopping:
    """What the driver does with signals."""

    can_stop: bool
    can_leave: bool = False
    is_requested: bool = False
    is_immediate: bool = False

    def act(self, number: signal.Signals) -> None:
        """Ask the ranks to stop; at the second Ctrl-C, or Ctrl-\\, end them. From any thread."""
        is_second = self.is_requested and number == signal.SIGINT
        self.is_immediate |= is_second or number == signal.SIGQUIT or not self.can_stop
        is_first, self.is_requested = not self.is_requested, True
        ranks, is_leave = psutil.Process().children(), self.can_leave and number != signal.SIGINT
        ask = ASK_TO_LEAVE if is_leave else ASK
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL if self.is_immediate else ask)
        if not ranks:  # still waiting for other nodes
            report_error("stopped: no rank was running")
            end_driver(EXIT_STOPPED)
        if is_first and not self.is_immediate:
            rest = "; other nodes go on" if is_leave else ""
            report_error(f"stopping: a checkpoint is written{rest} (Ctrl-C again: stop at once, without)")

    def explains(self, failures: Mapping[int, ProcessFailure]) -> bool:
        """Whether ranks ended because they were asked to, which is reported."""
        if self.is_immediate:
            report_error("stopped at once, without a checkpoint" if self.can_stop else "stopped")
            return True
        codes = {failure.exitcode for failure in failures.values()}
        if self.is_requested and codes & {-ASK, -ASK_TO_LEAVE}:
            report_error("stopped before training began")
        elif self.is_requested and EXIT_STOPPED in codes:
            report_error(WITHOUT_CHECKPOINT)
        else:
            return False
        return True


class _StoppedError(RuntimeError):
    """Ranks were asked to stop, and do not start again."""


class _RendezvousUntilStopped:
    """A rendezvous for ranks that torch's agent does not start again after a failure once they were asked to stop."""

    def __init__(self, handler: RendezvousHandler, stopping: _Stopping) -> None:
        self._handler, self._stopping = handler, stopping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> RendezvousInfo:
        if self._stopping.is_requested:
            raise _StoppedError
        return self._handler.next_rendezvous()


def report_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """Print why this node ends, unless its ranks have; return the exit code. `failures` are by rank."""
    if EXIT_USER_ERROR in {failure.exitcode for failure in failures.values()}:  # a rank has printed why
        return EXIT_USER_ERROR
    report_error(_cause(failures))
    return EXIT_FAILURE


def _cause(failures: Mapping[int, ProcessFailure]) -> str:
    """The line that says why this node ends.

    A rank's own record of its failure comes first. Else a rank that a signal ended is the cause: the others record that
    they lost contact with it. SIGTERM came from the agent.
    """
    host = socket.gethostname()
    recorded: dict[str, str] = {}
    for failure in failures.values():
        if isinstance(message := failure.error_file_data["message"], dict):  # of the exception that the rank ended with
            kind, _, line = message["message"].partition(": ")
            recorded.setdefault(kind, line)
    if line := recorded.get(RankFailedError.__name__):
        return f"error: {line}"
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            advice = "; was memory short?" if failure.exitcode == -signal.SIGKILL else ""
            return f"error: rank {rank} on {host}: ended by {signal.Signals(-failure.exitcode).name}{advice}"
    if line := recorded.get(LostContactError.__name__):
        return f"error: {line}"
    if line := recorded.get(PeerFailedError.__name__):  # the cause is on another node, which reports it
        return f"ended on {host}: {line}"
    rank, failure = min(failures.items())
    return f"error: rank {rank} on {host}: ended with code {failure.exitcode}"
