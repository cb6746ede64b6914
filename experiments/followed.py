"""Train in this process, and look at the pool whenever a round has ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.messages import Json, encode
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.replay import Trajectory
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.run.journal import Journal, Sink
from adloco_dist.run.rows import TrainerRow
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import train
from helpers.processes import CPU_RANKS

PATIENT = replace(CPU_RANKS, silence_seconds=100.0)
"""For ranks that look long."""
TIMEOUT_SECONDS = 3600.0
"""Of a run."""
Look = Callable[[LocalPool, Json], None]
"""Takes the pool and the record of its first trainer's round."""


@dataclass
class _Looks(Sink):
    """A sink that hands on what it is given."""

    pool: LocalPool
    look: Look

    def write(self, rows: Sequence[TrainerRow]) -> None:
        self.look(self.pool, encode(rows[0]))

    def close(self, result: Json | None) -> None:
        """Nothing is left to do."""


def train_followed(runtime: Runtime, overrides: Sequence[str], look: Look) -> LocalPool:
    """Train to the end of the budget; rank 0 looks."""
    torch.set_num_threads(1)
    settings = compose(overrides)
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    layout = experiment_layout(settings, runtime.nodes)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    pool = set_up_pool(settings, runtime, splits, objective, module, layout)
    inputs = find_plan_inputs(pool, layout, Trajectory())
    sinks = [_Looks(pool, look)] if runtime.rank == 0 else []
    train(pool, inputs, Journal(sinks), StopRequest())
    return pool
