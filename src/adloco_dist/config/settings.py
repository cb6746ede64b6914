"""Every setting of a run: its type, unit, default and the checks that need nothing but the settings.

Hydra composes the groups under conf/ onto `Settings`; `OmegaConf.to_object` then builds these dataclasses, and
each `__post_init__` refuses what cannot work. No torch here: a wrong setting is reported before anything heavy
is imported or any process group exists.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from adloco_dist.config.choices import (
    Algorithm,
    Backend,
    Corpus,
    Device,
    InnerOptimizer,
    OuterState,
    Placement,
    Precision,
    Schedule,
    TrackingMode,
)
from adloco_dist.config.errors import SettingsError, require


@dataclass
class PoolSettings:
    """Trainers, their workers, and where both live."""

    trainers: int = 4
    """k: trainers that run side by side, each with an anchor and a shard of its own."""
    workers_per_trainer: int | None = 1
    """M: model instances of each trainer. null: as many as there are ranks for each trainer."""
    placement: Placement = Placement.pack
    """pack: a trainer's workers on as few nodes as balance allows. spread: on as many as it has workers."""
    outer_state: OuterState = OuterState.device
    """Where anchors and outer momentum live: on the device, or in (pinned) CPU memory."""

    def __post_init__(self) -> None:
        require(self.trainers >= 1, "pool.trainers", self.trainers, "must be >= 1")
        workers = self.workers_per_trainer
        require(workers is None or workers >= 1, "pool.workers_per_trainer", workers, "must be >= 1, or null")


@dataclass
class ModelSettings:
    """What is trained."""

    architecture: str | None = "llama"
    """A causal model type of transformers (llama, gpt2, ...). null: take it from `warm_start`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of that architecture's transformers config, for example hidden_size."""
    warm_start: str | None = None
    """Weights to start from: a local transformers directory, or a run directory (its model/ is taken)."""

    def __post_init__(self) -> None:
        require(
            self.architecture is not None or self.warm_start is not None,
            "model.architecture",
            self.architecture,
            "name a causal model type of transformers, or set model.warm_start to a local model",
        )


@dataclass
class DataSettings:
    """What it is trained on."""

    corpus: Corpus = Corpus.python_stdlib
    """python_stdlib: the sources of the running Python. text: files as bytes. tokens: .npy files of token ids."""
    train: list[str] = field(default_factory=list)
    """Files or globs (text), or .npy files (tokens) to train on."""
    validation: list[str] = field(default_factory=list)
    """The same for validation. Empty: `validation_fraction` of `train` is held out."""
    validation_fraction: float = 0.05
    """Share of the files (of the tail, where there is one file) that is held out, in (0, 1)."""
    vocab_size: int | None = None
    """Vocabulary of token files. null: largest id + 1. Text needs none: it is bytes."""
    sequence_length: int = 128
    """Tokens per sequence that are predicted; a stored sequence is one longer."""

    def __post_init__(self) -> None:
        require(self.sequence_length >= 1, "data.sequence_length", self.sequence_length, "must be >= 1 token")
        fraction = self.validation_fraction
        require(0 < fraction < 1, "data.validation_fraction", fraction, "must lie between 0 and 1, both excluded")
        needs_files = self.corpus is not Corpus.python_stdlib
        if needs_files:
            require(bool(self.train), "data.train", self.train, f"data.corpus={self.corpus.name} needs files or globs")
        else:
            for name in ("train", "validation"):
                files = getattr(self, name)
                require(not files, f"data.{name}", files, "has no effect with data.corpus=python_stdlib; use data=text")
        if self.vocab_size is not None:
            require(self.vocab_size >= 2, "data.vocab_size", self.vocab_size, "must be >= 2, or null")
            is_tokens = self.corpus is Corpus.tokens
            require(is_tokens, "data.vocab_size", self.vocab_size, "is for data.corpus=tokens; text is always bytes")


@dataclass
class AlgorithmSettings:
    """How updates and averaging alternate."""

    name: Algorithm = Algorithm.diloco
    """diloco, adloco and localsgd average pseudo-gradients once a round (they differ in `outer`); ddp averages
    gradients at every update with DistributedDataParallel, one worker per rank."""
    updates_per_round: int = 25
    """H: inner updates that every worker takes between two outer steps."""

    def __post_init__(self) -> None:
        updates = self.updates_per_round
        require(updates >= 1, "algorithm.updates_per_round", updates, "must be >= 1")


@dataclass
class InnerSettings:
    """Every worker's optimizer."""

    optimizer: InnerOptimizer = InnerOptimizer.adamw
    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.1
    """Decoupled for adamw, added to the gradient for sgd; never applied to vectors (norms, biases)."""
    clip_norm: float | None = 1.0
    """Largest norm of a gradient; null: no clipping."""
    schedule: Schedule = Schedule.cosine
    warmup_tokens: int = 0
    """Tokens of the whole pool over which the rate rises linearly to `lr`."""
    final_lr_fraction: float = 0.1
    """Share of `lr` that the cosine schedule ends at."""
    reset_each_round: bool = False
    """Whether inner moments start anew in every round."""

    def __post_init__(self) -> None:
        require(0 < self.lr < inf, "inner.lr", self.lr, "must be > 0")
        require(0 <= self.beta1 < 1, "inner.beta1", self.beta1, "must be in [0, 1)")
        require(0 <= self.beta2 < 1, "inner.beta2", self.beta2, "must be in [0, 1)")
        require(self.eps > 0, "inner.eps", self.eps, "must be > 0")
        require(0 <= self.momentum < 1, "inner.momentum", self.momentum, "must be in [0, 1)")
        require(self.weight_decay >= 0, "inner.weight_decay", self.weight_decay, "must be >= 0")
        require(self.clip_norm is None or self.clip_norm > 0, "inner.clip_norm", self.clip_norm, "must be > 0, or null")
        require(self.warmup_tokens >= 0, "inner.warmup_tokens", self.warmup_tokens, "must be >= 0 tokens")
        fraction = self.final_lr_fraction
        require(0 <= fraction <= 1, "inner.final_lr_fraction", fraction, "must be in [0, 1]")


@dataclass
class OuterSettings:
    """Every trainer's optimizer on its anchor."""

    lr: float = 0.7
    """Rate of the outer SGD on the anchor, whose gradient is the pseudo-gradient (DiLoCo, 2311.08105)."""
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        require(0 < self.lr < inf, "outer.lr", self.lr, "must be > 0")
        require(0 <= self.momentum < 1, "outer.momentum", self.momentum, "must be in [0, 1)")
        usable = not self.nesterov or self.momentum > 0
        require(usable, "outer.nesterov", self.nesterov, "needs outer.momentum > 0; set outer.nesterov=false")


@dataclass
class BatchingSettings:
    """Sequences per update and per pass."""

    local_batch: int = 4
    """b: sequences per update of each worker."""
    capacity: int | None = None
    """Sequences that a rank's device takes in one pass; a larger batch is accumulated. null: any number."""

    def __post_init__(self) -> None:
        require(self.local_batch >= 1, "batching.local_batch", self.local_batch, "must be >= 1 sequence")
        capacity = self.capacity
        require(capacity is None or capacity >= 1, "batching.capacity", capacity, "must be >= 1 sequence, or null")


@dataclass
class BudgetSettings:
    """When training ends: exactly one is set."""

    rounds: int | None = None
    tokens: int | None = None
    """Tokens of the whole pool; the round in which they are reached is finished."""
    seconds: float | None = None
    """Of rank 0's clock, from the first round on."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            shown = ", ".join(f"budget.{name}={value}" for name, value in given.items()) or "budget.*=null"
            raise SettingsError(f"{shown}: set exactly one of budget.rounds, budget.tokens, budget.seconds")
        for name, value in given.items():
            require(value > 0, f"budget.{name}", value, "must be > 0")


@dataclass
class EvaluationSettings:
    """When and on how much the anchors are evaluated."""

    every_rounds: int | None = 5
    """Rounds between two evaluations of the anchors; null: only at the end."""
    sequences: int = 64
    """Validation sequences of an evaluation while training, at most what the split holds."""
    final_sequences: int | None = 512
    """The same for the evaluation at the end; null: the whole split."""
    batch: int = 16
    """Sequences per forward pass of an evaluation."""

    def __post_init__(self) -> None:
        every = self.every_rounds
        require(every is None or every >= 1, "evaluation.every_rounds", every, "must be >= 1, or null")
        require(self.sequences >= 1, "evaluation.sequences", self.sequences, "must be >= 1")
        final = self.final_sequences
        require(final is None or final >= 1, "evaluation.final_sequences", final, "must be >= 1, or null for all")
        require(self.batch >= 1, "evaluation.batch", self.batch, "must be >= 1")


@dataclass
class ClusterSettings:
    """Devices, backend and timeouts."""

    device: Device = Device.auto
    """auto: a GPU where the rank has one, else the CPU."""
    backend: Backend = Backend.auto
    """For tensors. auto: nccl on GPUs of their own, else gloo. Control messages always travel over gloo."""
    threads_per_rank: int | None = None
    """CPU threads of a rank; null: the node's cores divided by its ranks."""
    control_seconds: float = 1800.0
    """Timeout of control messages; must outlast the difference between the fastest and slowest rank's round."""
    outer_seconds: float = 600.0
    """Timeout of the outer step's traffic."""
    merge_seconds: float = 600.0
    """Timeout of traffic that combines anchors of several trainers."""

    def __post_init__(self) -> None:
        for name in ("control_seconds", "outer_seconds", "merge_seconds"):
            value = getattr(self, name)
            require(value > 0, f"cluster.{name}", value, "must be > 0 seconds")
        threads = self.threads_per_rank
        require(threads is None or threads >= 1, "cluster.threads_per_rank", threads, "must be >= 1, or null")
        impossible = self.device is Device.cpu and self.backend is Backend.nccl
        require(not impossible, "cluster.backend", self.backend, "needs GPUs, but cluster.device=cpu; use gloo")


@dataclass
class TrackingSettings:
    """Where records go beside the run directory."""

    mode: TrackingMode = TrackingMode.auto
    """Weights & Biases. auto: online when the user is logged in, else offline; disabled: not used."""
    project: str = "adloco_dist"


@dataclass
class RunSettings:
    """Where the run directory is."""

    directory: str | None = None
    """The run directory; null: a new one under `root`, named by date and time."""
    root: str = "runs"


@dataclass
class Settings:
    """A run."""

    seed: int = 0
    """Seeds the initial weights, the shards' order and every random number of training."""
    precision: Precision = Precision.fp32
    """bf16: fp32 weights under bf16 autocast. fp64: for exact comparisons."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    inner: InnerSettings = field(default_factory=InnerSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    budget: BudgetSettings = field(default_factory=lambda: BudgetSettings(rounds=20))
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "must be >= 0")
        if self.algorithm.name is Algorithm.ddp:
            trainers = self.pool.trainers
            require(trainers == 1, "pool.trainers", trainers, "algorithm=ddp has one trainer; set pool.trainers=1")
