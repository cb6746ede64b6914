"""Where to run: the options of every command that starts ranks, named as torchrun's, for that is what takes them."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from adloco_dist.config import RunSettings, SettingsError, Unfinished
from adloco_dist.config.errors import require
from adloco_dist.config.running import MAX_SECONDS
from adloco_dist.launch.rendezvous import JOB, JOIN_SECONDS, Rendezvous, check_port

OF_SEVERAL_NODES = ("rdzv_endpoint", "rdzv_id", "local_addr", "join_timeout")
"""Options that say something about several nodes alone."""
DEFAULTS = {"nnodes": "1", "rdzv_id": JOB, "join_timeout": JOIN_SECONDS, "jobs": 1}
"""Of options that are set without being given."""


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Let a command's user say where its ranks run."""
    parser.add_argument("--nproc-per-node", type=int, metavar="G", help="ranks on this machine (one per GPU, else 2)")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="port of the rendezvous (default: a free one)")
    parser.add_argument("--nnodes", default="1", metavar="N|MIN:MAX", help="nodes that this command is started on")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="R", help="starts after a rank or a node was lost"
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
    rule = "when a node is lost, the ranks of the others fail and are started again; set --max-restarts as well"
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
    restarts = options.max_restarts
    if options.slurm:
        said_by_slurm = ("nnodes", "rdzv_endpoint", "rdzv_id", "local_addr", "master_port")
        refuse_options(options, said_by_slurm, "with --slurm, where the job says it; leave it out")
        rendezvous = Rendezvous.from_slurm(options.join_timeout, restarts)
    elif num_nodes == 1:
        refuse_options(options, OF_SEVERAL_NODES, "on one node; set --nnodes as well, or leave it out")
        check_port(options.master_port or 0)
        return Rendezvous(max_restarts=restarts, endpoint=f"localhost:{options.master_port or 0}")
    else:
        refuse_options(options, ("master_port",), "on several nodes; name the port in --rdzv-endpoint")
        rule = "needs --rdzv-endpoint=HOST:PORT, the same on all nodes; or start torchrun on each (see README)"
        require(options.rdzv_endpoint is not None, "--nnodes", options.nnodes, rule)
        rendezvous = Rendezvous(
            num_nodes=num_nodes,
            min_nodes=min_nodes,
            max_restarts=restarts,
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


def start_tool(options: argparse.Namespace, num_ranks: int, module: str, arguments: Sequence[str]) -> NoReturn:
    """Run `module` as every rank of this node; ranks that are asked to stop end immediately.

    Raises:
        SettingsError: as in `rendezvous_of`.
    """
    rendezvous = rendezvous_of(options)
    from adloco_dist.launch.agent import start_ranks  # takes seconds

    start_ranks(rendezvous, num_ranks, ("-m", module, *arguments), can_stop=False)


def num_gpus() -> int:
    """Return how many GPUs torch can use here."""
    import torch  # a second

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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
