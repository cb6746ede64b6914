"""Where to run: options named as torchrun's, which takes them, and where the nodes of a job meet."""

import argparse
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from adloco_dist.addresses import unresolved
from adloco_dist.cluster.meeting import Meeting, nodes_in_words
from adloco_dist.config import RunSettings, SettingsError, Unfinished, require
from adloco_dist.config.running import MAX_SECONDS
from adloco_dist.text import first_line

FIRST_SLURM_PORT = 20000
"""First port for Slurm jobs, below Linux' ephemeral ports, so that no outgoing connection holds it by chance."""
NUM_SLURM_PORTS = 10000
DEFAULT_PORT = 29400
"""torchrun's default port, for an endpoint that names none."""
JOB, JOIN_SECONDS = "adloco", 600
"""Defaults of --rdzv-id and --join-timeout."""
OF_SEVERAL_NODES = ("rdzv_endpoint", "rdzv_id", "local_addr", "join_timeout")
"""Options that need several nodes."""
DEFAULTS = {"nnodes": "1", "rdzv_id": JOB, "join_timeout": JOIN_SECONDS, "jobs": 1}
"""Of options that have a value when they are not given."""


@dataclass(frozen=True)
class Rendezvous:
    """How the nodes of a job find each other: their agents, or where ranks outlive a lost node, the ranks."""

    num_nodes: int = 1
    """Maximum number of nodes."""
    min_nodes: int = 1
    """Number of nodes with which the job starts, or continues without others."""
    max_restarts: int = 0
    """How often the ranks of a node are started again when one of them fails."""
    endpoint: str = "localhost:0"
    """Host and port where they look for each other, opened on that host; port 0: a free one, on a single node."""
    job: str = ""
    """Keeps jobs apart that meet at one endpoint."""
    address: str | None = "localhost"
    """Address of this node for the others; None: its full host name."""
    timeout_seconds: int = JOIN_SECONDS
    """How long to wait for all nodes to come, or for the minimum number of them."""

    @property
    def meeting(self) -> Meeting | None:
        """How the ranks of all nodes find each other, where they go on when a node is lost; None: they do not, and the
        agents find each other."""
        if self.num_nodes == 1 or self.max_restarts == 0:
            return None
        host, port = self.place()
        nodes = (self.min_nodes, self.num_nodes)
        return Meeting([f"{host}:{port}"], *nodes, self.address, self.timeout_seconds, self.job)

    @property
    def wanted(self) -> str:
        """How many nodes the job needs, in words."""
        return nodes_in_words(self.min_nodes, self.num_nodes)

    def place(self) -> tuple[str, int]:
        """Host and port of the endpoint; raises a SettingsError where it names none, or a host that is not known
        here."""
        rule = "must be HOST:PORT, of one of the nodes"
        try:
            parts = urlsplit(f"//{self.endpoint}")
            host, port = parts.hostname, DEFAULT_PORT if parts.port is None else parts.port
        except ValueError as error:
            raise SettingsError(f"--rdzv-endpoint={self.endpoint}: {rule} ({error})") from error
        if not host or parts.netloc != self.endpoint or port <= 0:
            raise SettingsError.of("--rdzv-endpoint", self.endpoint, rule)
        if reason := unresolved(host):
            here = socket.gethostname()
            rule = f"the host {host} is not known on {here} ({reason}); name one of the nodes, or its address"
            raise SettingsError(f"--rdzv-endpoint={self.endpoint}: {rule}")
        return host, port

    @classmethod
    def from_slurm(cls, timeout_seconds: int, max_restarts: int) -> "Rendezvous":
        """The rendezvous of this Slurm job's nodes, for a process that srun started once on each; raises a
        SettingsError where this is no task of a Slurm job."""
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
        return cls(num_nodes, num_nodes, max_restarts, endpoint, f"{job}-{attempt}", here, timeout_seconds)


def _check_port(port: int) -> None:
    """Refuse a port of this machine that cannot be opened."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            rule = f"cannot be used ({error}); choose another port, or leave it out for a free one"
            raise SettingsError.of("--master-port", port, rule) from error


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a command's ranks run."""
    parser.add_argument("--nproc-per-node", type=int, metavar="G", help="ranks on this machine (one per GPU, else 2)")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="port of the rendezvous (default: a free one)")
    parser.add_argument("--nnodes", default="1", metavar="N|MIN:MAX", help="nodes that this command is started on")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="R", help="starts after a rank was lost; nodes may come and go"
    )
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="one of several nodes, where all of them meet")
    parser.add_argument("--rdzv-id", default=JOB, metavar="ID", help="keeps jobs apart that meet at one place")
    parser.add_argument("--local-addr", metavar="ADDR", help="this node's address (default: its full host name)")
    parser.add_argument(
        "--join-timeout", type=int, default=JOIN_SECONDS, metavar="S", help="seconds for all nodes to come"
    )
    parser.add_argument("--slurm", action="store_true", help="take nodes and rendezvous from the Slurm job")


def asked_nodes(options: argparse.Namespace) -> tuple[int, int]:
    """Return the minimum and the maximum number of nodes that `--nnodes` names, or refuse it."""
    minimum, _, maximum = options.nnodes.partition(":")
    is_range = minimum.isdecimal() and (maximum or minimum).isdecimal() and 1 <= int(minimum) <= int(maximum or minimum)
    require(is_range, "--nnodes", options.nnodes, "must be N, or MIN:MAX, with 1 <= MIN <= MAX")
    require(options.max_restarts >= 0, "--max-restarts", options.max_restarts, "must be >= 0")
    can_lose_nodes = not maximum or minimum == maximum or options.max_restarts > 0
    rule = "when a node is lost, the others go on, and ranks that have failed start again; set --max-restarts as well"
    require(can_lose_nodes, "--nnodes", options.nnodes, rule)
    return int(minimum), int(maximum or minimum)


def rendezvous_of(options: argparse.Namespace) -> Rendezvous:
    """Where the agents of all nodes meet.

    Raises:
        SettingsError: the options do not say where, or say what has no effect there; the endpoint's host is unknown.
    """
    min_nodes, num_nodes = asked_nodes(options)
    is_usable = 1 <= options.join_timeout <= MAX_SECONDS
    require(is_usable, "--join-timeout", options.join_timeout, f"must be from 1 to {MAX_SECONDS:,} seconds")
    if options.slurm:
        said_by_slurm = ("nnodes", "rdzv_endpoint", "rdzv_id", "local_addr", "master_port")
        refuse_options(options, said_by_slurm, "with --slurm, where the job says it; leave it out")
        rendezvous = Rendezvous.from_slurm(options.join_timeout, options.max_restarts)
    elif num_nodes == 1:
        refuse_options(options, OF_SEVERAL_NODES, "on one node; set --nnodes as well, or leave it out")
        _check_port(options.master_port or 0)
        return Rendezvous(max_restarts=options.max_restarts, endpoint=f"localhost:{options.master_port or 0}")
    else:
        refuse_options(options, ("master_port",), "on several nodes; name the port in --rdzv-endpoint")
        rule = "needs --rdzv-endpoint=HOST:PORT, the same on all nodes; or start torchrun on each (see README)"
        require(options.rdzv_endpoint is not None, "--nnodes", options.nnodes, rule)
        rendezvous = Rendezvous(
            num_nodes=num_nodes,
            min_nodes=min_nodes,
            max_restarts=options.max_restarts,
            endpoint=options.rdzv_endpoint,
            job=options.rdzv_id,
            address=options.local_addr,
            timeout_seconds=options.join_timeout,
        )
    rendezvous.place()
    return rendezvous


def asked_ranks(options: argparse.Namespace) -> int | None:
    """Return how many ranks to start on this machine, at least one; None where the user leaves that open."""
    asked = options.nproc_per_node
    require(asked is None or asked >= 1, "--nproc-per-node", asked, "must be >= 1")
    return asked


def check_restarts(run: RunSettings, max_restarts: int) -> None:
    """Refuse a run that would not find what it has left when it is started again."""
    can_resume = run.directory is not None and run.unfinished is Unfinished.resume
    rule = "a run that is started again must find its checkpoints: set run.directory, and run.unfinished=resume"
    require(max_restarts == 0 or can_resume, "--max-restarts", max_restarts, rule)


def refuse_options(options: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Refuse options that were given and would silently do nothing."""
    for name in names:
        value = getattr(options, name)
        if value and value != DEFAULTS.get(name):
            shown = "" if value is True else f"={value}"
            raise SettingsError(f"--{name.replace('_', '-')}{shown}: has no effect {where}")
