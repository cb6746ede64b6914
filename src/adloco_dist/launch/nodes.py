"""Where to run: the options of every command that starts ranks, named as torchrun's, for that is what takes them."""

import argparse

from adloco_dist.config import Settings, SettingsError, Unfinished
from adloco_dist.config.running import MAX_SECONDS
from adloco_dist.launch.rendezvous import JOB, JOIN_SECONDS, Rendezvous, check_port

OF_SEVERAL_NODES = {"rdzv_endpoint": None, "rdzv_id": JOB, "local_addr": None, "join_timeout": JOIN_SECONDS}
"""Options that say something about several nodes alone, with their defaults."""


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
    """Return the minimum and the maximum number of nodes that `--nnodes` names.

    Raises:
        SettingsError: it names none.
    """
    minimum, _, maximum = options.nnodes.partition(":")
    is_range = minimum.isdecimal() and (maximum or minimum).isdecimal() and 1 <= int(minimum) <= int(maximum or minimum)
    if not is_range:
        raise SettingsError.of("--nnodes", options.nnodes, "must be N, or MIN:MAX, with 1 <= MIN <= MAX")
    if options.max_restarts < 0:
        raise SettingsError.of("--max-restarts", options.max_restarts, "must be >= 0")
    is_elastic = not maximum or minimum == maximum or options.max_restarts > 0
    rule = "when a node is lost, the ranks of the others fail and are started again; set --max-restarts as well"
    if not is_elastic:
        raise SettingsError.of("--nnodes", options.nnodes, rule)
    return int(minimum), int(maximum or minimum)


def rendezvous_of(options: argparse.Namespace) -> Rendezvous:
    """Where the agents of all nodes meet.

    Raises:
        SettingsError: the options do not say where, or say what has no effect there; the endpoint's host is unknown.
    """
    min_nodes, num_nodes = asked_nodes(options)
    is_usable, rule = 1 <= options.join_timeout <= MAX_SECONDS, f"must be from 1 to {MAX_SECONDS:,} seconds"
    if not is_usable:
        raise SettingsError.of("--join-timeout", options.join_timeout, rule)
    restarts = options.max_restarts
    if options.slurm:
        _refuse(
            options,
            ("nnodes", "rdzv_endpoint", "rdzv_id", "local_addr", "master_port"),
            "with --slurm, where the job says it; leave it out",
        )
        rendezvous = Rendezvous.from_slurm(options.join_timeout, restarts)
    elif num_nodes == 1:
        _refuse(options, tuple(OF_SEVERAL_NODES), "on one node; set --nnodes as well, or leave it out")
        check_port(options.master_port or 0)
        return Rendezvous(max_restarts=restarts, endpoint=f"localhost:{options.master_port or 0}")
    else:
        _refuse(options, ("master_port",), "on several nodes; name the port in --rdzv-endpoint")
        rule = "needs --rdzv-endpoint=HOST:PORT, the same on all nodes; or start torchrun on each (see README)"
        if options.rdzv_endpoint is None:
            raise SettingsError.of("--nnodes", options.nnodes, rule)
        rendezvous = Rendezvous(
            num_nodes, min_nodes, restarts, options.rdzv_endpoint, options.rdzv_id, options.local_addr,
            options.join_timeout,
        )  # fmt: skip
    rendezvous.place()
    return rendezvous


def check_num_ranks(options: argparse.Namespace) -> None:
    """
    Raises:
        SettingsError: fewer than one rank was asked for.
    """
    asked = options.nproc_per_node
    if asked is not None and asked < 1:
        raise SettingsError.of("--nproc-per-node", asked, "must be >= 1")


def check_restarts(settings: Settings, max_restarts: int) -> None:
    """Check that a run that is started again would find what it has left.

    Raises:
        SettingsError: it would not.
    """
    can_resume = settings.run.directory is not None and settings.run.unfinished is Unfinished.resume
    rule = "a run that is started again must find its checkpoints: set run.directory, and run.unfinished=resume"
    if max_restarts != 0 and not can_resume:
        raise SettingsError.of("--max-restarts", max_restarts, rule)


def _refuse(options: argparse.Namespace, names: tuple[str, ...], where: str) -> None:
    """Refuse options that would silently do nothing."""
    defaults = {**OF_SEVERAL_NODES, "nnodes": "1", "master_port": None}
    for name in names:
        value = getattr(options, name)
        if value != defaults[name]:
            raise SettingsError(f"--{name.replace('_', '-')}={value}: has no effect {where}")
