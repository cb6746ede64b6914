"""Runs of a sweep as jobs of a Hydra launcher, such as Slurm jobs through hydra-submitit-launcher."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adloco_dist.config import EXIT_FAILURE, SettingsError
from adloco_dist.config.compose import CONFIG_MODULE, explain, store_schema
from adloco_dist.sweep.points import Launch, Point
from adloco_dist.terminal import report_error, report_line
from adloco_dist.text import first_line

QUIET = ("hydra.output_subdir=null", "hydra.sweep.subdir=slurm", "hydra/job_logging=none", "hydra/hydra_logging=none")
"""What Hydra would write beside a run's own records."""

NOT_IN_CONFIG = ("SBATCH_EXCLUSIVE", "SBATCH_CPUS_PER_GPU")
"""What slurm/site.env asks for and the plugin has no setting for: sbatch takes them from the environment."""


def launch_through(name: str, hydra_overrides: Sequence[str], program: Sequence[str]) -> Launch:
    """The launcher with its settings, before anything is submitted; `program` starts a driver, as in `LocalDrivers`.

    Raises:
        SettingsError: it is not installed, cannot submit from here, or does not take a setting.
    """
    config, loader = compose_launcher(name, hydra_overrides)
    if name == "slurm" and shutil.which("sbatch") is None:
        raise SettingsError("hydra/launcher=slurm: no sbatch on this machine; start it where jobs are submitted")
    context = HydraContext(loader, Callbacks(config))

    def launch(points: Sequence[Point]) -> list[int]:
        for variable in [name for name in os.environ if name.startswith("SBATCH_") and name not in NOT_IN_CONFIG]:
            del os.environ[variable]  # they are in the config by now; sbatch would let them win over it
        task = functools.partial(run_in_job, program=tuple(program))
        launcher = Plugins.instance().instantiate_launcher(config=config, hydra_context=context, task_function=task)

        def launch_one(number: int) -> int:
            # One by one: of several runs the launcher would wait for none after the first whose job has no result.
            try:
                (done,) = launcher.launch([list(points[number].overrides)], initial_job_idx=number)
                return done.return_value
            except Exception as error:  # whatever became of its job: out of memory, cancelled, its node lost
                kind = type(error).__name__
                report_error(f"run {number + 1} of {len(points)}: its job has no result: {kind}: {first_line(error)}")
                return EXIT_FAILURE

        report_line(f"{len(points)} jobs through {name}; interrupted, they resume")
        concurrent = config.hydra.launcher.get("array_parallelism", len(points))
        with ThreadPoolExecutor(min(concurrent, len(points))) as executor:
            return list(executor.map(launch_one, range(len(points))))

    return launch


def compose_launcher(name: str, hydra_overrides: Sequence[str]) -> tuple[DictConfig, ConfigLoader]:
    """What Hydra makes of the launcher's settings, those of the environment (slurm/site.env) included; raises a
    SettingsError as `launch_through` does."""
    store_schema()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            config = hydra.compose_config("train", [*QUIET, *hydra_overrides], run_mode=RunMode.MULTIRUN)
            OmegaConf.resolve(config.hydra.launcher)
            return config, hydra.config_loader
    except (HydraException, OmegaConfBaseException) as error:
        needs = "" if name != "slurm" else "; it needs hydra-submitit-launcher: pip install 'adloco_dist[slurm]'"
        raise SettingsError(explain(error) + needs) from error


def run_in_job(config: DictConfig, program: Sequence[str]) -> int:
    """One node's part of a run, inside the job that a launcher started for it; the driver's exit code."""
    overrides = list(HydraConfig.get().overrides.task)
    directory = Path(str(config.run.directory))
    slurm = ["--slurm"] if "SLURM_JOB_ID" in os.environ else []
    node = os.environ.get("SLURM_NODEID", "0")
    log = directory.with_name(directory.name + (".log" if node == "0" else f".node{node}.log"))
    command = [sys.executable, *program, *slurm, *overrides]
    with log.open("a", encoding="utf-8") as output:
        driver = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        driver.terminate()  # it lets the round end

    for number in (signal.SIGTERM, signal.SIGUSR2):  # the latter is submitit's warning before the time limit
        signal.signal(number, pass_on)
    return driver.wait()
