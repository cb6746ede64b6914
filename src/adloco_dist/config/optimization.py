"""How weights change: the algorithm, the workers' optimizer, the anchors' optimizer."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

from adloco_dist.config.choices import Averages, InnerOptimizer, RateScaling, RoundLength, Schedule
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ReadWhen

OUTER_STEPS = "algorithm.averages=pseudo_gradients"
ADAMW = "inner.optimizer=adamw,muon"
"""Muon leaves vectors and embeddings to AdamW."""


@dataclass
class AlgorithmSettings:
    """How updates and averaging alternate. The choices `diloco` and `localsgd` of the group `algorithm` differ in
    `outer` alone; `adloco`, the default, also sets the length of rounds, `wire`, `batching.request`, the inner rate and
    its schedule, and an average of anchors (docs/settings.md, "What `algorithm` changes")."""

    averages: Averages = Averages.pseudo_gradients
    """pseudo_gradients: once a round, between the workers of a trainer. gradients: at every update, with
    DistributedDataParallel, one worker per rank (algorithm=ddp)."""
    updates_per_round: int = 25
    """H: inner updates that every worker takes between two outer steps; with round=speed, the fastest;
    with round=seconds, the most that any takes; with round=link, in the first round."""
    round: RoundLength = RoundLength.updates
    """updates: every worker takes as many. speed: workers on a rank that was slower in the last round take fewer, so
    that ranks do not wait for each other, and weigh less in the average. seconds: as with speed, and as many as were
    measured to fit into `round_seconds`. link: every worker takes as many, and all together as few as the measured
    costs of a round allow (`exposed_share`); as long as no trainer has two workers, `updates_per_round`."""
    round_seconds: Annotated[float | None, ReadWhen("algorithm.round=seconds")] = None
    """Time that the inner updates of a round are to take with round=seconds, > 0; the first one takes 5 updates."""
    exposed_share: Annotated[float, ReadWhen("algorithm.round=link")] = 0.2
    """Share of a round, in (0, 1), that averages and all else but updates are to take with round=link: with longer
    rounds, or delays, it is less, but workers drift further apart."""
    min_updates: Annotated[int, ReadWhen("algorithm.round=link")] = 2
    """Minimum of H with round=link; a delay of one update needs two, and each of wire.fragments its own."""
    max_updates: Annotated[int, ReadWhen("algorithm.round=link")] = 400
    """Maximum of H with round=link."""

    def __post_init__(self) -> None:
        updates = self.updates_per_round
        if updates < 1:
            raise SettingsError.of("algorithm.updates_per_round", updates, "must be >= 1")
        if not 0 < self.exposed_share < 1:
            raise SettingsError.of("algorithm.exposed_share", self.exposed_share, "must be in (0, 1)")
        if self.min_updates < 1:
            raise SettingsError.of("algorithm.min_updates", self.min_updates, "must be >= 1")
        if self.max_updates < self.min_updates:
            rule = f"must be >= algorithm.min_updates={self.min_updates}"
            raise SettingsError.of("algorithm.max_updates", self.max_updates, rule)
        seconds = self.round_seconds
        if seconds is not None and not 0 < seconds < inf:
            raise SettingsError.of("algorithm.round_seconds", seconds, "must be > 0, or null")
        if (seconds is not None) != (self.round is RoundLength.seconds):
            rule = "goes with algorithm.round=seconds; set both, or leave both out"
            raise SettingsError.of("algorithm.round_seconds", "null" if seconds is None else seconds, rule)

    @property
    def is_data_parallel(self) -> bool:
        """Whether gradients are averaged at every update, which leaves a rank one worker and a run one trainer."""
        return self.averages is Averages.gradients


@dataclass
class InnerSettings:
    """Every worker's optimizer."""

    optimizer: InnerOptimizer = InnerOptimizer.adamw
    """Algorithm of the inner updates: AdamW; SGD with or without momentum; Muon for the matrices between embeddings and
    output, and AdamW for all else (MuLoCo, 2505.23725), at one rate for both."""
    lr: float = 3e-4
    """Peak learning rate, > 0."""
    beta1: Annotated[float, ReadWhen(ADAMW)] = 0.9
    """Decay of adamw's running mean of gradients, in [0, 1)."""
    beta2: Annotated[float, ReadWhen(ADAMW)] = 0.95
    """Decay of adamw's running mean of squared gradients, in [0, 1)."""
    eps: Annotated[float, ReadWhen(ADAMW)] = 1e-8
    """Constant that adamw adds to the denominator of its updates, > 0."""
    momentum: Annotated[float, ReadWhen("inner.optimizer=sgd,muon")] = 0.0
    """Momentum of sgd and of muon, in [0, 1)."""
    weight_decay: float = 0.1
    """Decoupled for adamw and muon, added to the gradient for sgd; never applied to vectors (norms, biases)."""
    clip_norm: float | None = 1.0
    """Maximum norm of a gradient, > 0; null: no clipping."""
    schedule: Schedule = Schedule.cosine
    """Course of the rate apart from the warm-up: constant at `lr`, or cosine decay while the budget is spent."""
    warmup_fraction: float = 0.1
    """Share of the budget, in [0, 1), over which the rate rises linearly to `lr`, from a tenth of it."""
    final_lr_fraction: Annotated[float, ReadWhen("inner.schedule=cosine")] = 0.1
    """Share of `lr` that the cosine schedule ends at, in [0, 1]."""
    batch_scaling: RateScaling = RateScaling.sqrt
    """How the rate follows the local batch in use: lr times (b / reference_batch), its square root, or not at all."""
    reference_batch: Annotated[int | None, ReadWhen("inner.batch_scaling=sqrt,linear")] = None
    """Local batch at which the rate is `lr`; null: batching.local_batch."""
    reset_each_round: Annotated[bool, ReadWhen(ADAMW), ReadWhen("inner.momentum>0")] = False
    """Whether inner moments start at zero in every round."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < inf:
            raise SettingsError.of("inner.lr", self.lr, "must be > 0")
        if not 0 <= self.beta1 < 1:
            raise SettingsError.of("inner.beta1", self.beta1, "must be in [0, 1)")
        if not 0 <= self.beta2 < 1:
            raise SettingsError.of("inner.beta2", self.beta2, "must be in [0, 1)")
        if not self.eps > 0:
            raise SettingsError.of("inner.eps", self.eps, "must be > 0")
        if not 0 <= self.momentum < 1:
            raise SettingsError.of("inner.momentum", self.momentum, "must be in [0, 1)")
        if not self.weight_decay >= 0:
            raise SettingsError.of("inner.weight_decay", self.weight_decay, "must be >= 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SettingsError.of("inner.clip_norm", self.clip_norm, "must be > 0, or null")
        if not 0 <= self.warmup_fraction < 1:
            raise SettingsError.of("inner.warmup_fraction", self.warmup_fraction, "must be in [0, 1), of the budget")
        fraction = self.final_lr_fraction
        if not 0 <= fraction <= 1:
            raise SettingsError.of("inner.final_lr_fraction", fraction, "must be in [0, 1]")
        reference = self.reference_batch
        if reference is not None and reference < 1:
            raise SettingsError.of("inner.reference_batch", reference, "must be >= 1, or null")


@dataclass
class OuterSettings:
    """Every trainer's optimizer on its anchor."""

    lr: Annotated[float, ReadWhen(OUTER_STEPS)] = 0.7
    """Rate of the outer SGD on the anchor, whose gradient is the pseudo-gradient (DiLoCo, 2311.08105)."""
    momentum: Annotated[float, ReadWhen(OUTER_STEPS)] = 0.9
    """Momentum of the outer SGD, in [0, 1)."""
    nesterov: Annotated[bool, ReadWhen(OUTER_STEPS, "outer.momentum>0")] = True
    """Whether the outer SGD takes Nesterov momentum, which needs momentum > 0."""
    clip_norm: Annotated[float | None, ReadWhen(OUTER_STEPS)] = None
    """Maximum norm of each worker's pseudo-gradient, of every fragment, > 0; null: no clipping."""
    radial: Annotated[bool, ReadWhen(OUTER_STEPS)] = False
    """Whether the mean of every tensor but embeddings has the direction of the mean of unit vectors and the mean of the
    workers' norms (Decoupled DiLoCo, 2604.21428): a plain mean of pseudo-gradients that differ is shorter."""
    outlier_deviations: Annotated[float | None, ReadWhen(OUTER_STEPS)] = None
    """Standard deviations by which the norm of a worker's pseudo-gradient may be above the mean of its earlier ones,
    > 0; a larger one is left out of the average, and the worker restarts from the anchor (EDiT, 2412.07210, has 3).
    null: none is left out."""
    outlier_rounds: Annotated[int, ReadWhen(OUTER_STEPS, "outer.outlier_deviations!=null")] = 20
    """Rounds of a worker, >= 2, after which it may be left out."""
    average_span: float | None = None
    """Share of the tokens so far, in (0, 1], over which a trainer's anchors are averaged (`averaging.anchors`); the
    average is evaluated and saved. It takes a vector of the model's size, which merges alone send. null: the last
    anchor."""
    nonfinite_rounds: int = 10
    """Rounds in a row in which workers of a trainer may be left out as non-finite before the run stops."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < inf:
            raise SettingsError.of("outer.lr", self.lr, "must be > 0")
        if not 0 <= self.momentum < 1:
            raise SettingsError.of("outer.momentum", self.momentum, "must be in [0, 1)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SettingsError.of("outer.clip_norm", self.clip_norm, "must be > 0, or null")
        if self.outlier_deviations is not None and not self.outlier_deviations > 0:
            raise SettingsError.of("outer.outlier_deviations", self.outlier_deviations, "must be > 0, or null")
        if self.outlier_rounds < 2:
            raise SettingsError.of("outer.outlier_rounds", self.outlier_rounds, "must be >= 2 rounds")
        if self.average_span is not None and not 0 < self.average_span <= 1:
            raise SettingsError.of("outer.average_span", self.average_span, "must be in (0, 1], or null")
        usable = not self.nesterov or self.momentum > 0
        if self.nonfinite_rounds < 1:
            raise SettingsError.of("outer.nonfinite_rounds", self.nonfinite_rounds, "must be >= 1")
        if not usable:
            raise SettingsError.of(
                "outer.nesterov", self.nesterov, "needs outer.momentum > 0; set outer.nesterov=false"
            )
