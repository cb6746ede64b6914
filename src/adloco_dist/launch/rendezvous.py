"""Where the agents of a job's nodes meet: torchrun's c10d rendezvous, from options or from a Slurm job."""

import os
import socket
import subprocess
from dataclasses import dataclass
from urllib.parse import urlsplit

from adloco_dist.addresses import unresolved
from adloco_dist.config import SettingsError
from adloco_dist.text import first_line

FIRST_SLURM_PORT = 20000
"""First port for Slurm jobs, below Linux' ephemeral ports, so that no outgoing connection holds it by chance."""
NUM_SLURM_PORTS = 10000
DEFAULT_PORT = 29400
"""torchrun's default port, for an endpoint that names none."""
JOB, JOIN_SECONDS = "adloco", 600
"""Defaults of --rdzv-id and --join-timeout."""
ELASTIC_TIMEOUTS = {"last_call_timeout": 5, "keep_alive_interval": 2, "keep_alive_max_attempt": 3, "read_timeout": 20}
"""Seconds: a last call for nodes once there are enough, heartbeats of agents (missed so often: dead), and for an answer
of the node that holds the rendezvous."""


@dataclass(frozen=True)
class Rendezvous:
    """How the agents of a job's nodes find each other."""

    num_nodes: int = 1
    """Maximum number of nodes."""
    min_nodes: int | None = None
    """Number of nodes with which the job starts, or continues without others; None: all."""
    max_restarts: int = 0
    """How often the ranks of a node are started again when one fails; nodes that come or go do not count."""
    endpoint: str = "localhost:0"
    """Host and port of the store, which the agent on that host opens; port 0: a free one, on a single node."""
    job: str = ""
    """Keeps jobs apart that meet at one endpoint."""
    address: str | None = "localhost"
    """Address of this node for the others; None: its full host name."""
    timeout_seconds: int = 600
    """How long to wait for all nodes to come, or for the minimum number of them."""

    @property
    def is_elastic(self) -> bool:
        """Whether the job outlives ranks and nodes."""
        return self.max_restarts > 0

    @property
    def wanted(self) -> str:
        """How many nodes the job needs, in words."""
        minimum = self.min_nodes or self.num_nodes
        return f"{minimum} nodes" if minimum == self.num_nodes else f"{minimum} to {self.num_nodes} nodes"

    def timeouts(self) -> dict[str, int]:
        """torchrun's timeouts, in seconds. An elastic job does not wait for lost nodes as long as for late ones."""
        timeouts = {"join_timeout": self.timeout_seconds, "read_timeout": self.timeout_seconds}
        if self.is_elastic:
            timeouts |= ELASTIC_TIMEOUTS
        return timeouts

    def place(self) -> tuple[str, int]:
        """Host and port of the endpoint.

        Raises:
            SettingsError: it names none, or a host that is not known here.
        """
        rule = "must be HOST:PORT, of one of the nodes"
        try:
            parts = urlsplit(f"//{self.endpoint}")
            host, port = parts.hostname, DEFAULT_PORT if parts.port is None else parts.port
        except ValueError as error:
            raise SettingsError(f"--rdzv-endpoint={self.endpoint}: {rule} ({error})") from error
        if not host or parts.netloc != self.endpoint or port <= 0:
            raise SettingsError.of("--rdzv-endpoint", self.endpoint, rule)
        assert host is not None
        if reason := unresolved(host):
            here = socket.gethostname()
            rule = f"the host {host} is not known on {here} ({reason}); name one of the nodes, or its address"
            raise SettingsError(f"--rdzv-endpoint={self.endpoint}: {rule}")
        return host, port

    @classmethod
    def from_slurm(cls, timeout_seconds: int, max_restarts: int) -> "Rendezvous":
        """Return the rendezvous of this Slurm job's nodes, for a process that srun started once on each.

        Raises:
            SettingsError: this is no task of a Slurm job.
        """
        try:
            job, num_nodes = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_JOB_NUM_NODES"])
            nodes, here = os.environ["SLURM_JOB_NODELIST"], os.environ["SLURMD_NODENAME"]
            names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
            first = names.stdout.split()[0]
        except (KeyError, ValueError, OSError, subprocess.CalledProcessError, IndexError) as error:
            remedy = "start it with srun inside a job, as slurm/train.sbatch does"
            raise SettingsError(f"--slurm: no such job can be seen here ({first_line(error)}); {remedy}") from error
        port = FIRST_SLURM_PORT + job % NUM_SLURM_PORTS
        # A requeued job has the same id: what is left of its last start must not meet it.
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        endpoint = f"{first}:{port}"
        return cls(num_nodes, None, max_restarts, endpoint, f"{job}-{attempt}", here, timeout_seconds)


def check_port(port: int) -> None:
    """Refuse a port of this machine that cannot be opened."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            rule = f"cannot be used ({error}); choose another port, or leave it out for a free one"
            raise SettingsError.of("--master-port", port, rule) from error
