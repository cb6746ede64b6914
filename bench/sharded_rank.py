"""One rank of a run of bench/sharded.py: trains as launch/train.py does, and leaves what memory that took.

Memory is resident memory, or on a GPU what torch has allocated. The baseline is taken when everything is imported and
the corpus is there, just before the model is built; the peak is that of all that comes after.
"""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from adloco_dist.config import Settings
from adloco_dist.launch.driver import main
from adloco_dist.launch.rank import run_rank
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.protocol import Objective
from adloco_dist.setup.parts import NamedParts

FOLDER = "SHARDED_FOLDER"
"""Variable that names where ranks leave their figures, one file each."""
LAZY = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""Modules that sides import at different times."""


class Memory:
    """Bytes of this process, from now on.

    Attributes:
        before: what it had already.
        peak: the maximum since then, that included.
    """

    def __init__(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the maximum begins anew
        self.before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else _status("VmRSS")

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else _status("VmHWM")


def _status(name: str) -> int:
    """Bytes that the kernel has counted of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


class MeasuredObjective(LanguageObjective):
    """Takes the baseline before it builds the model."""

    memory: Memory

    def build(self, device: torch.device, in_bf16: bool) -> PreTrainedModel:
        MeasuredObjective.memory = Memory()
        return super().build(device, in_bf16)


class MeasuredParts(NamedParts):
    command = (__file__,)

    def objective(self, settings: Settings, splits: Any, reads_weights: bool = True) -> Objective:
        return MeasuredObjective.fitted(settings, splits.vocabulary)


def train() -> None:
    """What a rank does, which then leaves its figures."""
    for module in LAZY:
        importlib.import_module(module)
    run_rank(sys.argv[1:], dry_run=False, parts=MeasuredParts())
    memory = MeasuredObjective.memory
    file = Path(os.environ[FOLDER]) / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps({"before": memory.before, "peak": memory.peak}), encoding="utf-8")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        main(parts=MeasuredParts())
