"""The driver: one command that checks the settings, then starts torchrun's agent, or a sweep of such commands."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from adloco_dist.cluster.signals import STOP_SIGNALS, end_on_stop_signals, hold_signals
from adloco_dist.command import importing
from adloco_dist.config import EXIT_FAILURE, Device, Settings, SettingsError
from adloco_dist.config.compose import to_yaml
from adloco_dist.config.without_effect import without_effect
from adloco_dist.data.hub import prefer_cache_without_hub
from adloco_dist.launch.exit_codes import ends_reported
from adloco_dist.launch.joining import as_joined
from adloco_dist.launch.launchers import refuse_other_launchers, speaks_for_node
from adloco_dist.launch.rendezvous import (
    OF_SEVERAL_NODES,
    Rendezvous,
    add_torchrun_options,
    asked_nodes,
    asked_ranks,
    check_restarts,
    refuse_options,
    rendezvous_of,
)
from adloco_dist.policy.layout import check_ranks, seat_nodes
from adloco_dist.run.directory import check_directory
from adloco_dist.setup.parts import NamedParts, Parts
from adloco_dist.terminal import output_was_lost, reported_wait, show

DESCRIPTION = """\
Train a pool of DiLoCo trainers. Started alone, it runs on this machine; under torchrun, on all its nodes:
  torchrun --nnodes N --nproc-per-node G ... launch/train.py key=value ...
Settings are key=value or group=choice (groups: model data algorithm inner outer wire merge tracking
experiment), for example: algorithm=localsgd inner.lr=1e-3 pool.trainers=2
With -m, settings may have several values, and every combination of them is a run:
  launch/train.py -m inner.lr=2.5e-3,5e-3,1e-2 wire=fp32,adaptive
Exit codes: 0 done, 1 failed, 2 a mistake in what was asked (nothing was started), 75 asked to stop before the end.
"""

ONLY_OF_SWEEPS = ("jobs", "redo")
NOT_OF_SWEEPS = ("master_port", "nnodes", "max_restarts", *OF_SEVERAL_NODES, "slurm", "dry_run", "print_config")


def main(arguments: list[str] | None = None, parts: Parts | None = None) -> NoReturn:
    """Entry point of launch/train.py, adloco-train and `launch`; ends the process.

    Args:
        parts: what is trained on what; None: what the settings name.
    """
    parts = parts or NamedParts()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_intermixed_args(arguments)  # settings and options in any order
    with ends_reported() as is_rank:
        if is_rank:
            _as_rank(options, arguments, parts)
            sys.exit(0)
        with end_on_stop_signals():  # until ranks run, which are asked first
            code = _as_driver(options, parts)
        for number in STOP_SIGNALS:  # they would end the process while the interpreter is taken down
            signal.signal(number, signal.SIG_IGN)
        sys.exit(code)


def _as_rank(options: argparse.Namespace, arguments: Sequence[str], parts: Parts) -> None:
    """Train, or refuse to."""
    if options.multirun:
        rule = "-m: each run of a sweep is a torchrun of its own; start it without torchrun"
        raise SettingsError(f"{rule}: python {shlex.join([sys.argv[0], *arguments])}")
    hold_signals([number for number in STOP_SIGNALS if number != signal.SIGTERM])
    with reported_wait(lambda: "starting: still importing", speaks=speaks_for_node()), importing():
        from adloco_dist.launch.rank import run_rank  # takes seconds

    run_rank(options.overrides, options.dry_run, parts)


def _as_driver(options: argparse.Namespace, parts: Parts) -> int:
    """Do what was asked; return the exit code. What needs torch is imported as late as possible."""
    options = as_joined(options)
    unused, where = (NOT_OF_SWEEPS, "with") if options.multirun else (ONLY_OF_SWEEPS, "without")
    refuse_options(options, unused, f"{where} -m; leave it out")
    # What failed is reported in one line; torch's warnings about it, with addresses of its code, would bury it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if options.multirun:
        refuse_other_launchers()
        from adloco_dist.sweep.sweep import sweep

        passed_on = [f"--nproc-per-node={options.nproc_per_node}"] if options.nproc_per_node else []
        return sweep(options.overrides, parts.compose, (*parts.command, *passed_on), options.jobs, options.redo)
    settings = parts.compose(options.overrides)
    if options.print_config:
        show(f"{to_yaml(settings).rstrip()}\n# on this machine: {_arithmetic(settings)}")
        return EXIT_FAILURE if output_was_lost() else 0
    prefer_cache_without_hub(settings.data.hub, settings.data.tokenizer, settings.model.warm_start)
    num_nodes = asked_nodes(options)[1]
    if options.dry_run:
        from adloco_dist.setup.dry_run import print_dry_run

        check_restarts(settings.run, options.max_restarts)
        if num_nodes == 1:
            check_directory(settings.run)
        num_ranks = asked_ranks(options) or _default_ranks(settings)
        nodes = [node for node in range(num_nodes) for _ in range(num_ranks)]
        unread = [f"{line}: {why}" for line, why in without_effect(settings, options.overrides).items()]
        print_dry_run(settings, nodes, parts, unread=unread)
        return EXIT_FAILURE if output_was_lost() else 0
    if not options.slurm and num_nodes == 1:
        refuse_other_launchers()
    rendezvous = rendezvous_of(options)
    num_ranks = asked_ranks(options) or _default_ranks(settings)
    _refuse_early(settings, rendezvous, num_ranks)
    with importing():
        from adloco_dist.launch.agent import start_ranks  # takes seconds

    if meeting := rendezvous.meeting:
        meeting.to_environment()
        rendezvous = Rendezvous(max_restarts=rendezvous.max_restarts)  # of this node's ranks alone
    return start_ranks(rendezvous, num_ranks, (*parts.command, *options.overrides), can_leave=meeting is not None)


def _arithmetic(settings: Settings) -> str:
    import torch  # a second

    from adloco_dist.pool.arithmetic import planned_in_words

    is_cuda = settings.cluster.device is not Device.cpu and torch.cuda.is_available()
    return planned_in_words(settings, torch.device("cuda", 0) if is_cuda else torch.device("cpu"))


def _refuse_early(settings: Settings, rendezvous: Rendezvous, num_ranks: int) -> None:
    """Refuse what is known to be wrong before any rank starts; other nodes may have other ranks, and the directory."""
    size = settings.pool.ranks_per_worker
    seat_nodes([0] * num_ranks, size)
    minimum = num_ranks + size * (rendezvous.min_nodes - 1)
    check_ranks(settings, minimum, is_all=rendezvous.num_nodes == 1)
    check_restarts(settings.run, rendezvous.max_restarts)
    if rendezvous.num_nodes == 1:
        check_directory(settings.run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra reads them")
    parser.add_argument("-m", "--multirun", action="store_true", help="run every combination of the settings' values")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="with -m: runs at one time on this machine")
    parser.add_argument("--redo", action="store_true", help="with -m: run finished ones again (the old are kept)")
    add_torchrun_options(parser)
    parser.add_argument("--join", metavar="HOST:PORT", help="take part in the run whose nodes meet there, as it is set")
    parser.add_argument("--dry-run", action="store_true", help="print layout, memory and traffic; train nothing")
    parser.add_argument("--print-config", action="store_true", help="print all settings as YAML; train nothing")
    return parser


def _default_ranks(settings: Settings) -> int:
    """Return how many ranks to start by default: one per GPU, but none without a worker; without GPUs two, or as many
    as a worker spans.
    """
    from adloco_dist.cluster.devices import num_gpus  # with torch: a second

    workers, size = settings.pool.workers_per_trainer, settings.pool.ranks_per_worker
    num_devices = num_gpus() or max(2, size)
    return min(num_devices, settings.pool.trainers * workers * size) if workers else num_devices
