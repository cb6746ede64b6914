"""What is trained: the pool, how it shrinks, the model."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from adloco_dist.config.choices import MergePolicy, OuterState, Placement
from adloco_dist.config.errors import require
from adloco_dist.config.marks import ON_A_GPU, SEVERAL_TRAINERS, Range, ReadWhen

MAX_WORKERS = 1 << 20
"""Maximum number of workers in a pool: every rank and every plan lists all of them."""
TINY = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
"""A Llama of about 0.8 million parameters: 10,000 tokens per second on one CPU core."""
MERGES = ReadWhen(SEVERAL_TRAINERS, "merge.policy!=none", "batching.request!=replay")
"""Trainers merge, and not as a recorded run has it."""


@dataclass
class PoolSettings:
    """Trainers, their workers, and where both live."""

    trainers: Annotated[int, Range(">= 1")] = 1
    """k: trainers that run side by side, each with an anchor and a shard of its own."""
    workers_per_trainer: Annotated[int | None, Range(">= 1")] = None
    """M: model instances of each trainer. null: as many as there are ranks for each trainer."""
    ranks_per_worker: Annotated[int, Range(">= 1")] = 1
    """S: neighbouring ranks of a node that hold a worker's model together, each a part of every parameter
    (fully_shard). 1: a worker fits one device."""
    placement: Placement = Placement.pack
    """pack: a trainer's workers on as few nodes as balance allows. spread: on as many as it has workers."""
    outer_state: Annotated[OuterState, ReadWhen(ON_A_GPU)] = OuterState.device
    """Where anchors, outer momentum and averages of anchors live: on the device, or in (pinned) CPU memory."""

    def __post_init__(self) -> None:
        workers = self.workers_per_trainer
        given = "null" if workers is None else workers
        rule = f"times pool.workers_per_trainer={given} must be <= {MAX_WORKERS}; lower one of them"
        require(self.trainers * (workers or 1) <= MAX_WORKERS, "pool.trainers", self.trainers, rule)


@dataclass
class MergeSettings:
    """How the pool shrinks: several trainers become one, for which all their workers work from then on, where they are.
    A member's anchor and outer momentum count for its bounded request in the average."""

    policy: Annotated[MergePolicy, ReadWhen(SEVERAL_TRAINERS, "batching.request!=replay")] = (
        MergePolicy.worst_with_worst
    )
    """worst_with_worst: the trainers with the smallest requests. best_with_worst: the one with the largest request
    takes in those with the smallest. worst_loss_with_best: the one with the smallest loss takes in those with the
    largest; validation losses decide where the last round ended with an evaluation. none: trainers never merge."""
    every_rounds: Annotated[int, MERGES, Range(">= 1")] = 5
    """Rounds between two times at which trainers merge."""
    width: Annotated[int, MERGES, Range(">= 2: a merge takes two trainers or more")] = 2
    """w: trainers that become one; fewer where `min_trainers` asks for it."""
    min_trainers: Annotated[int, MERGES, Range(">= 1")] = 1
    """Minimum number of trainers that are left."""


@dataclass
class ModelSettings:
    """What is trained."""

    architecture: str | None = "llama"
    """A model type of transformers (llama, gpt2, bert, ...). null: take it from `warm_start`."""
    overrides: dict[str, Any] = field(default_factory=lambda: dict(TINY))
    """Fields of its transformers config (hidden_size, ...). A choice of the group `model` replaces all of them."""
    warm_start: str | None = None
    """Weights to start from: a transformers directory, a run directory (its model/ is taken), or a model of the hub,
    `NAME` or `NAME@REVISION` (a branch, tag or commit; else the newest)."""
    from_scratch: Annotated[bool, ReadWhen("model.warm_start!=null")] = False
    """Take the shape of `warm_start` alone, and draw the weights from the seed."""
    reset_output: bool = False
    """Initialise the output layer again: the head of a causal model, or of a classifier."""
    attention: str | None = None
    """How transformers computes attention: eager, sdpa, flash_attention_2, ... null: what it takes by itself."""
    compile: bool = False
    """Compile model and loss with torch.compile; the first rounds are slower. false: on a GPU the loss alone is
    compiled, if there is Triton and a C compiler; the first lines of a run say whether it is."""
    gradient_checkpointing: bool = False
    """Keep no activations inside layers and compute them again: less memory, about a third more time."""
    trust_remote_code: Annotated[bool, ReadWhen("model.warm_start!=null")] = False
    """Run Python code that comes with `warm_start`. Weights are never unpickled all the same."""

    def __post_init__(self) -> None:
        is_named = self.architecture is not None or self.warm_start is not None
        rule = "name a model type of transformers, or set model.warm_start to a model"
        require(is_named, "model.architecture", self.architecture, rule)
        for name in ("from_scratch", "trust_remote_code"):
            value, rule = getattr(self, name), "has no effect without model.warm_start; leave it out"
            require(not value or self.warm_start is not None, f"model.{name}", value, rule)
