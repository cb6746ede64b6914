"""How weights change: the algorithm, the workers' optimizer, the anchors' optimizer."""

from dataclasses import dataclass
from math import inf

from adloco_dist.config.choices import Algorithm, InnerOptimizer, RateScaling, Schedule
from adloco_dist.config.errors import require


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
    batch_scaling: RateScaling = RateScaling.sqrt
    """How the rate follows the local batch in use: lr times (b / reference_batch), its square root, or not at all."""
    reference_batch: int | None = None
    """Local batch at which the rate is `lr`; null: batching.local_batch."""
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
        reference = self.reference_batch
        require(reference is None or reference >= 1, "inner.reference_batch", reference, "must be >= 1, or null")


@dataclass
class OuterSettings:
    """Every trainer's optimizer on its anchor."""

    lr: float = 0.7
    """Rate of the outer SGD on the anchor, whose gradient is the pseudo-gradient (DiLoCo, 2311.08105)."""
    momentum: float = 0.9
    nesterov: bool = True
    spoilt_rounds: int = 10
    """Rounds in a row in which workers of a trainer may be left out, for they were not finite, before the run stops."""

    def __post_init__(self) -> None:
        require(0 < self.lr < inf, "outer.lr", self.lr, "must be > 0")
        require(0 <= self.momentum < 1, "outer.momentum", self.momentum, "must be in [0, 1)")
        usable = not self.nesterov or self.momentum > 0
        require(self.spoilt_rounds >= 1, "outer.spoilt_rounds", self.spoilt_rounds, "must be >= 1")
        require(usable, "outer.nesterov", self.nesterov, "needs outer.momentum > 0; set outer.nesterov=false")
