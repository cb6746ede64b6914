"""Ranks of torchrun, each of which a framework takes for the only one."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables of a rank's environment. accelerate, and with it transformers' Trainer, looks for other ranks in them."""


def join_ranks(backend: str | None = None, timeout_seconds: float = 1800.0) -> tuple[int, int]:
    """Connect this rank to the others, and hide them from frameworks that would average gradients in every update.

    torch.distributed is initialized from what torchrun wrote into the environment, which is then removed from it. A
    framework that is set up afterwards trains on this rank as it would in a process without others: it wraps the model
    in nothing, reads all data that it is given, and takes itself for the main process.

    It returns the rank, and the number of ranks.

    Args:
        backend: backend of the default process group; None: what torch chooses for the machine's devices.
        timeout_seconds: timeout of the default process group; DiLoCo waits for other ranks no longer than this.

    Raises:
        ValueError: torchrun did not start this process, or left it several GPUs to choose from; one line.
    """
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        rule = "it is not in the environment; start the script with torchrun, and call join_ranks() once"
        raise ValueError(f"{missing[0]}: {rule}")
    for name in TORCHRUN:
        if not os.environ[name].isdecimal():
            rule = "must be a number, as torchrun sets it; start the script with torchrun"
            raise ValueError(f"{name}={os.environ[name]}: {rule}")
    num_gpus, num_local = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if num_gpus > 1 and num_local > 1:
        rule = "each must see its own alone; start torchrun with --virtual-local-rank"
        raise ValueError(
            f"LOCAL_WORLD_SIZE={num_local}: every rank of this machine sees its {num_gpus} GPUs, but {rule}"
        )
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    for name in TORCHRUN:
        del os.environ[name]
    return dist.get_rank(), dist.get_world_size()
