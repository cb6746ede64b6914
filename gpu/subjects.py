"""What the cases train: small models on random ids, one trainer by itself or a rank of a pool."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType

from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import InnerReport
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.inner import InnerPhase
from harness import Here
from helpers.lone import lone_trainer

LLAMA = (
    "model=nano", "model.overrides.hidden_size=256", "model.overrides.intermediate_size=512",
    "model.overrides.num_key_value_heads=2",
)  # fmt: skip
"""Heads of 64, two of them for each key and value: what flash attention takes."""
LLAMA_LAYERS = 2
PLAIN = ("algorithm=diloco", "pool.trainers=1", "merge=none", "batching.request=none", "inner.schedule=constant")


@dataclass
class Bench:
    """One trainer by itself, and what its workers compute."""

    settings: Settings
    trainer: Trainer
    slot: ComputeSlot

    def plan(self, batch: int, updates: int) -> RoundPlan:
        """A round in which every worker takes `updates` updates of `batch` sequences."""
        settings = replace(self.settings, batching=replace(self.settings.batching, local_batch=batch))
        plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0])), None, PoolReport())
        return replace(plan, updates=updates)

    def run(self, batch: int, updates: int, slots: Sequence[ComputeSlot] = ()) -> InnerReport:
        """Such a round's inner phase: in turn, or at once on `slots`."""
        plan = replace(self.plan(batch, updates), is_concurrent=bool(slots))
        return InnerPhase(plan, self.settings).run([self.trainer], slots or [self.slot])[0]

    def restart(self) -> None:
        """All workers at the anchor, without moments."""
        for worker in self.trainer.workers:
            worker.weights.copy_(self.trainer.anchor)
            worker.reset_optimizer()


def new_bench(device: torch.device, *overrides: str, workers: int = 1, vocabulary: int = 1000) -> Bench:
    """A trainer with equal weights on every device."""
    settings = compose([*LLAMA, *PLAIN, f"pool.workers_per_trainer={workers}", *overrides])
    length = settings.data.sequence_length
    ids = np.random.default_rng(0).integers(0, vocabulary, 200 * length + 1, dtype=np.uint16)
    table = TokenTable([ids], length)
    objective = LanguageObjective.fitted(settings, Vocabulary(vocabulary))
    module = objective.build(torch.device("cpu"), in_bf16=False)
    trainer, slot = lone_trainer(settings, objective, module, table, range(workers), device=device)
    return Bench(settings, trainer, slot)


def sized(here: Here, on_gpu: int, on_cpu: int) -> int:
    """A size for the measurement, or one for trying the code out."""
    return on_gpu if here.is_cuda else on_cpu


def is_on_gpu(event: FunctionEvent) -> bool:
    """Whether a profiled event is a kernel or a copy, rather than the shadow of a named block of Python."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation
