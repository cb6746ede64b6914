"""The driver: one command on one machine, which checks the settings and starts torchrun."""

import argparse
import logging
import os
import signal
import socket
import sys
import uuid
from contextlib import suppress
from types import FrameType

import psutil

from adloco_dist.config import EXIT_USER_ERROR, Settings, SettingsError, require, told_in_one_line
from adloco_dist.config.compose import compose, to_yaml

EXIT_FAILURE = 1
DESCRIPTION = """\
Train a pool of DiLoCo trainers. Started alone, it runs on this machine; under torchrun, on all its nodes:
  torchrun --nnodes N --nproc-per-node G ... launch/train.py key=value ...
Settings are key=value or group=choice (groups: model data algorithm inner outer budget evaluation tracking
experiment), for example: algorithm=localsgd inner.lr=1e-3 pool.trainers=2
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/train.py and adloco-train; ends the process: 0 done, 2 a mistake of the user, 1 others."""
    options = _parser().parse_intermixed_args(arguments)  # settings and options in any order
    # All ranks raise what one of them found, so rank 0 speaks for all.
    with told_in_one_line(speaks=os.environ.get("RANK", "0") == "0"):
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Here, because a rank needs torch, and a wrong setting should be refused before that is loaded.
            from adloco_dist.launch.rank import run_rank

            run_rank(options.overrides, options.dry_run)
            return
        settings = compose(options.overrides)
        if options.print_config:
            print(to_yaml(settings), end="")
        elif options.dry_run:
            from adloco_dist.tools.planner import print_dry_run

            num_ranks = _num_ranks(settings, options)
            print_dry_run(settings, [node for node in range(options.nnodes) for _ in range(num_ranks)])
        else:
            sys.exit(_start_torchrun(settings, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra reads them")
    parser.add_argument("--nproc-per-node", type=int, metavar="G", help="ranks on this machine (one per GPU, else 2)")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="port of the rendezvous (default: a free one)")
    parser.add_argument("--dry-run", action="store_true", help="print layout, memory and traffic; train nothing")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes to plan for, with --dry-run")
    parser.add_argument("--print-config", action="store_true", help="print all settings as YAML; train nothing")
    return parser


def _start_torchrun(settings: Settings, options: argparse.Namespace) -> int:
    """Run all ranks of this machine under torch's elastic agent, in this process; the exit code of the run."""
    require(options.nnodes == 1, "--nnodes", options.nnodes, "for several nodes start torchrun on each (see README)")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    num_ranks = _num_ranks(settings, options)
    port = options.master_port or 0
    _check_port(port)
    # The ranks say themselves what failed; the agent's summary of it would only bury the line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Ranks are in sessions of their own, out of the terminal's reach; the agent passes nothing on, for it would give
    # them 30 seconds and then kill them in the middle of their round.
    signal.signal(signal.SIGINT, _pass_on_stop)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "adloco_dist.launch", *options.overrides)
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        return EXIT_USER_ERROR if first.exitcode == EXIT_USER_ERROR else EXIT_FAILURE
    return 0


def _num_ranks(settings: Settings, options: argparse.Namespace) -> int:
    """As asked; else one rank per GPU; without GPUs two, so that there is something to distribute; no idle ones."""
    require(options.nnodes >= 1, "--nnodes", options.nnodes, "must be >= 1")
    if options.nproc_per_node is not None:
        require(options.nproc_per_node >= 1, "--nproc-per-node", options.nproc_per_node, "must be >= 1")
        return options.nproc_per_node
    import torch

    workers_per_trainer = settings.pool.workers_per_trainer
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return min(num_devices, settings.pool.trainers * workers_per_trainer) if workers_per_trainer else num_devices


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"--master-port={port}: cannot be used ({error}); choose another port, or leave it out for a free one"
            ) from error


def _pass_on_stop(signum: int, frame: FrameType | None) -> None:
    message = "stopping: the round ends, then records and model are written (again: stop at once, without)"
    print(f"\n{message}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, _kill_ranks)
    _signal_ranks(signal.SIGINT)


def _kill_ranks(signum: int, frame: FrameType | None) -> None:
    _signal_ranks(signal.SIGKILL)


def _signal_ranks(number: signal.Signals) -> None:
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
