"""torchrun's agent for this node, in this process: it starts the ranks, stops them when asked, and says what failed."""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adloco_dist.cluster.signals import STOP_SIGNALS
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, SettingsError, require
from adloco_dist.launch.contact import watch_rendezvous
from adloco_dist.launch.outcome import AGENT, OUTCOME, noted_codes
from adloco_dist.terminal import tell_error

FIRST_SLURM_PORT = 20000
"""Below Linux' ephemeral ports, so that no outgoing connection holds it by chance."""
NUM_SLURM_PORTS = 10000
ELASTIC_TIMEOUTS = {"last_call_timeout": 5, "keep_alive_interval": 2, "keep_alive_max_attempt": 3, "read_timeout": 20}
"""Seconds: a last call for nodes once there are enough, heartbeats of agents (missed so often: dead), and for an answer
of the node that holds the rendezvous."""


@dataclass(frozen=True)
class Rendezvous:
    """How the agents of a job's nodes find each other: torchrun's c10d rendezvous."""

    num_nodes: int = 1
    """At most."""
    least_nodes: int | None = None
    """With which the job starts, or goes on without others; None: all."""
    max_restarts: int = 0
    """How often the ranks of a node are started again when one fails; nodes that come or go do not count."""
    endpoint: str = "localhost:0"
    """Host and port of the store, which the agent on that host opens; port 0: a free one, on a single node."""
    job: str = ""
    """Keeps jobs apart that meet at one endpoint."""
    address: str | None = "localhost"
    """Of this node, for the others; None: its full host name."""
    timeout_seconds: int = 600
    """For all nodes to come, or the least number of them."""

    @property
    def is_elastic(self) -> bool:
        """Whether the job outlives ranks and nodes."""
        return self.max_restarts > 0

    def timeouts(self) -> dict[str, int]:
        """torchrun's own, in seconds. An elastic job does not wait for nodes that are lost as it does for late ones."""
        timeouts = {"join_timeout": self.timeout_seconds, "read_timeout": self.timeout_seconds}
        if self.is_elastic:
            timeouts |= ELASTIC_TIMEOUTS
        return timeouts

    @classmethod
    def from_slurm(cls, timeout_seconds: int, max_restarts: int) -> "Rendezvous":
        """Between the nodes of this Slurm job, for a process that srun started once on each.

        Raises:
            SettingsError: this is no task of a Slurm job.
        """
        try:
            job, num_nodes = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_JOB_NUM_NODES"])
            nodes, here = os.environ["SLURM_JOB_NODELIST"], os.environ["SLURMD_NODENAME"]
        except KeyError as missing:
            line = f"--slurm: {missing} is not set; start it with srun inside a job, as slurm/train.sbatch does"
            raise SettingsError(line) from missing
        try:
            names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SettingsError(f"--slurm: scontrol does not say which hosts {nodes} are ({error})") from error
        port = FIRST_SLURM_PORT + int(job) % NUM_SLURM_PORTS
        # A requeued job has the same id: what is left of its last start must not meet it.
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        endpoint = f"{names.stdout.split()[0]}:{port}"
        return cls(num_nodes, None, max_restarts, endpoint, f"{job}-{attempt}", here, timeout_seconds)


def start_ranks(rendezvous: Rendezvous, num_ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` as every rank of this node, until all nodes are done; the exit code."""
    # What failed is told below, in one line; the agent's own account, from loggers of its own, would bury it.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Ranks are in sessions of their own, out of the terminal's reach; the agent passes nothing on, for it would give
    # them 30 seconds and then kill them in the middle of their round.
    for number in STOP_SIGNALS:
        signal.signal(number, _pass_on_stop)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    if rendezvous.is_elastic:
        # Else the agents would go on with the store of their first start, on a node that may be gone.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=rendezvous.least_nodes or rendezvous.num_nodes,
        max_nodes=rendezvous.num_nodes,
        nproc_per_node=num_ranks,
        run_id=rendezvous.job or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_configs=rendezvous.timeouts(),
        local_addr=rendezvous.address,
        max_restarts=rendezvous.max_restarts,
        signals_to_handle="SIGQUIT",  # not SIGHUP, which nohup wants ignored
    )
    if rendezvous.num_nodes > 1:
        watch_rendezvous(rendezvous.endpoint)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[OUTCOME], os.environ[AGENT] = folder, str(os.getpid())
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
        except ChildFailedError as failures:
            return _told(failures.failures)
        except (RendezvousTimeoutError, RendezvousConnectionError) as error:
            return _told_of_rendezvous(rendezvous, error, ranks_were_up=bool(noted_codes(Path(folder))))
        return max((code for code in noted_codes(Path(folder)) if code is not None), default=0)


def _told_of_rendezvous(rendezvous: Rendezvous, error: Exception, ranks_were_up: bool) -> int:
    """Print why the nodes are not together; the exit code."""
    if ranks_were_up:  # the agent that holds the store ended first, and tells the cause
        line = f"ended on {socket.gethostname()}: the agent at {rendezvous.endpoint} is gone; see what it says"
    else:
        wanted = f"{rendezvous.least_nodes or rendezvous.num_nodes} nodes within {rendezvous.timeout_seconds} s"
        remedy = "start the same command on every node, and check that this host and port can be reached from all"
        line = f"error: --rdzv-endpoint={rendezvous.endpoint}: did not bring together {wanted} ({error}); {remedy}"
    tell_error(line)
    return EXIT_FAILURE


def check_port(port: int) -> None:
    """Refuse a port of this machine that cannot be opened.

    Raises:
        SettingsError: it is in use, or no port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            rule = f"cannot be used ({error}); choose another port, or leave it out for a free one"
            require(False, "--master-port", port, rule)


def _told(failures: Mapping[int, ProcessFailure]) -> int:
    """Print the cause of this node's failures, unless its ranks have; the exit code.

    Args:
        failures: by rank.
    """
    if EXIT_USER_ERROR in {failure.exitcode for failure in failures.values()}:  # and said why
        return EXIT_USER_ERROR
    host = socket.gethostname()
    # A rank that a signal ended has told nobody: the others only lost contact with it. (SIGTERM came from the agent.)
    by_signal = [(rank, failure) for rank, failure in failures.items() if failure.exitcode < 0]
    killed = [(rank, failure) for rank, failure in by_signal if failure.exitcode != -signal.SIGTERM]
    recorded = [message for failure in failures.values() if (message := _recorded(failure))]
    own = [message for message in recorded if message.startswith("RankFailedError: ")]
    if killed:
        rank, failure = killed[0]  # the first to be found
        advice = "; was memory short?" if -failure.exitcode == signal.SIGKILL else ""
        line = f"error: rank {rank} on {host}: ended by {signal.Signals(-failure.exitcode).name}{advice}"
    elif own:
        line = f"error: {own[0].removeprefix('RankFailedError: ')}"
    elif recorded:  # the cause is on another node, which tells it
        line = f"ended on {host}: {recorded[0].removeprefix('PeerFailedError: ')}"
    else:
        rank, failure = min(failures.items())
        line = f"error: rank {rank} on {host}: ended with code {failure.exitcode}"
    tell_error(line)
    return EXIT_FAILURE


def _recorded(failure: ProcessFailure) -> str | None:
    """What the rank left in its error file, if it left one."""
    message = failure.error_file_data["message"]
    return message["message"] if isinstance(message, dict) else None


def _pass_on_stop(signum: int, frame: FrameType | None) -> None:
    if not _signal_ranks(signal.SIGINT):  # still waiting for other nodes
        sys.exit(EXIT_STOPPED)
    message = "stopping: a checkpoint is written (Ctrl-C again: stop at once, without)"
    tell_error(message)
    signal.signal(signal.SIGINT, _kill_ranks)


def _kill_ranks(signum: int, frame: FrameType | None) -> None:
    _signal_ranks(signal.SIGKILL)


def _signal_ranks(number: signal.Signals) -> int:
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    return len(ranks)
