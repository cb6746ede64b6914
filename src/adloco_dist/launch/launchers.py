"""What launchers say in the environment: torchrun to its ranks; others to their processes, or to a shell long after."""

import os
from pathlib import Path

from adloco_dist.config import SettingsError

RUN_ID = "TORCHELASTIC_RUN_ID"
PLACES = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE", "GROUP_RANK": "GROUP_WORLD_SIZE"}
"""Where torchrun says that a rank stands, and among how many."""
OTHERS = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
"""How others (deepspeed, mpirun, srun) tell a process how many there are, and which it is."""
DEBUG, DEBUG_LEVELS = "TORCH_DISTRIBUTED_DEBUG", ("OFF", "INFO", "DETAIL")


def is_torchrun_rank() -> bool:
    """Whether torchrun, or a driver of this program, started this process as a rank.

    Raises:
        SettingsError: some of what it gives its ranks is there, and some is not; torch cannot be imported.
    """
    level = os.environ.get(DEBUG, "OFF")
    if level.upper() not in DEBUG_LEVELS:
        raise SettingsError.of(DEBUG, level, f"must be one of {', '.join(DEBUG_LEVELS)}; set it so, or unset it")
    if RUN_ID not in os.environ:
        return False
    lacking = []
    for name in ("MASTER_ADDR", "MASTER_PORT", *PLACES, *PLACES.values()):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            lacking.append(f"{name}={value} is no number" if value else f"{name} is missing")
    for place, size in () if lacking else PLACES.items():
        if int(os.environ[place]) >= int(os.environ[size]):
            lacking.append(f"{place}={os.environ[place]} is not below {size}={os.environ[size]}")
    if lacking:
        rule = f"this is what torchrun gives its ranks, but {lacking[0]}"
        raise SettingsError.of(RUN_ID, os.environ[RUN_ID], f"{rule}; start it with torchrun, or unset {RUN_ID}")
    return True


def speaks_for_node() -> bool:
    """Whether this process reports what all ranks of its node find: the first of them does, and any process without an
    agent, as in a shell where variables of an earlier rank are left.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0" or not has_agent()


def has_agent() -> bool:
    """Whether the agent that started this rank is there: it keeps a folder for what its ranks report."""
    folder = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    return folder.is_absolute() and folder.is_dir()


def max_restarts() -> int:
    """How often torchrun starts its ranks again when one fails; more than 0 as well where nodes come and go."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def refuse_other_launchers() -> None:
    """Refuse to be one of several processes of another launcher, which would each train a run of its own."""
    for size, place in OTHERS.items():
        count, number = os.environ.get(size, ""), os.environ.get(place, "")
        if count.isdecimal() and number.isdecimal() and int(count) > 1:
            rule = f"another launcher started {count} of these, and each would train a run of its own"
            remedy = "start one, which starts the ranks of this machine itself, or use torchrun"
            if size.startswith("SLURM"):
                remedy = "start one on each node, with --slurm"
            raise SettingsError(f"{size}={count}, {place}={number}: {rule}; {remedy}; or unset {size}, if it is old")
