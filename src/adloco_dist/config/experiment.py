"""What is trained: the pool, the model."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from adloco_dist.config.choices import OuterState, Placement
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ON_A_GPU, ReadWhen

MAX_WORKERS = 1 << 20
"""Maximum number of workers in a pool: every rank and every plan lists all of them."""


@dataclass
class PoolSettings:
    """Trainers, their workers, and where both live."""

    trainers: int = 1
    """k: trainers that run side by side, each with an anchor and a shard of its own."""
    workers_per_trainer: int | None = None
    """M: model instances of each trainer. null: as many as there are ranks for each trainer."""
    ranks_per_worker: int = 1
    """S: neighbouring ranks of a node that hold a worker's model together, each a part of every parameter
    (fully_shard). 1: a worker fits one device."""
    placement: Placement = Placement.pack
    """pack: a trainer's workers on as few nodes as balance allows. spread: on as many as it has workers."""
    outer_state: Annotated[OuterState, ReadWhen(ON_A_GPU)] = OuterState.device
    """Where anchors, outer momentum and averages of anchors live: on the device, or in (pinned) CPU memory."""

    def __post_init__(self) -> None:
        if self.trainers < 1:
            raise SettingsError.of("pool.trainers", self.trainers, "must be >= 1")
        if self.ranks_per_worker < 1:
            raise SettingsError.of("pool.ranks_per_worker", self.ranks_per_worker, "must be >= 1")
        workers = self.workers_per_trainer
        if workers is not None and workers < 1:
            raise SettingsError.of("pool.workers_per_trainer", workers, "must be >= 1, or null")
        given = "null" if workers is None else workers
        rule = f"times pool.workers_per_trainer={given} must be <= {MAX_WORKERS}; lower one of them"
        if self.trainers * (workers or 1) > MAX_WORKERS:
            raise SettingsError.of("pool.trainers", self.trainers, rule)


@dataclass
class ModelSettings:
    """What is trained."""

    architecture: str | None = "llama"
    """A model type of transformers (llama, gpt2, bert, ...). null: take it from `warm_start`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of that architecture's transformers config, for example hidden_size."""
    warm_start: str | None = None
    """Weights to start from: a transformers directory, a run directory (its model/ is taken), or a model of the hub."""
    revision: Annotated[str | None, ReadWhen("model.warm_start!=null")] = None
    """Branch, tag or commit of a model of the hub. null: the newest."""
    from_scratch: Annotated[bool, ReadWhen("model.warm_start!=null")] = False
    """Take the shape of `warm_start` alone, and draw the weights from the seed."""
    reset_output: bool = False
    """Initialise the output layer again: the head of a causal model, or of a classifier."""
    attention: str | None = None
    """How transformers computes attention: eager, sdpa, flash_attention_2, ... null: what it takes by itself."""
    compile: bool = False
    """Compile model and loss with torch.compile; the first rounds are slower."""
    fuse_loss: Annotated[bool, ReadWhen(ON_A_GPU, "model.compile=false")] = True
    """Compile the loss by itself on a GPU where the model is not compiled; without Triton or a C compiler there it is
    computed as on a CPU, which the first lines of a run say."""
    gradient_checkpointing: bool = False
    """Keep no activations inside layers and compute them again: less memory, about a third more time."""
    trust_remote_code: Annotated[bool, ReadWhen("model.warm_start!=null")] = False
    """Run Python code that comes with `warm_start`. Weights are never unpickled all the same."""

    def __post_init__(self) -> None:
        if self.architecture is None and self.warm_start is None:
            raise SettingsError.of(
                "model.architecture",
                self.architecture,
                "name a model type of transformers, or set model.warm_start to a model",
            )
        for name in ("from_scratch", "trust_remote_code", "revision"):
            value, rule = getattr(self, name), "has no effect without model.warm_start; leave it out"
            if value and self.warm_start is None:
                raise SettingsError.of(f"model.{name}", value, rule)
