"""How weights change: the algorithm, the workers' optimizer, the anchors' optimizer, and how averages travel."""

from dataclasses import dataclass, field
from typing import Annotated

from adloco_dist.config.choices import Averages, InnerOptimizer, RateScaling, RoundLength, Schedule, WireFormat
from adloco_dist.config.errors import require
from adloco_dist.config.marks import Range, ReadWhen

OUTER_STEPS = "algorithm.averages=pseudo_gradients"
ADAMW = "inner.optimizer=adamw,muon"
"""Muon leaves vectors and embeddings to AdamW."""


@dataclass
class AlgorithmSettings:
    """How updates and averaging alternate. The choices of the group `algorithm` set more than this section
    (docs/settings.md, "What `algorithm` changes")."""

    averages: Averages = Averages.pseudo_gradients
    """pseudo_gradients: once a round, between the workers of a trainer. gradients: at every update, with
    DistributedDataParallel, one worker per rank (algorithm=ddp)."""
    updates_per_round: Annotated[int, Range(">= 1")] = 8
    """H: inner updates that every worker takes between two outer steps; with round=link, in the first two rounds and as
    long as no trainer has two workers: one alone has an average of its anchors, which should be of several."""
    round: RoundLength = RoundLength.link
    """updates: every worker takes as many. link: as few as the measured costs of a round allow; workers on slower ranks
    take fewer than others, so that ranks do not wait for each other, and weigh less in the average."""
    updates_range: Annotated[list[int], ReadWhen("algorithm.round=link")] = field(default_factory=lambda: [1, 400])
    """Minimum and maximum of H with round=link; a delay of one update needs two, and each of wire.fragments its own."""

    def __post_init__(self) -> None:
        bounds, rule = self.updates_range, "must be the minimum and the maximum of H, [1,400] for example, both >= 1"
        require(len(bounds) == 2 and 1 <= bounds[0] <= bounds[1], "algorithm.updates_range", bounds, rule)

    @property
    def is_data_parallel(self) -> bool:
        """Whether gradients are averaged at every update, which leaves a rank one worker and a run one trainer."""
        return self.averages is Averages.gradients


@dataclass
class InnerSettings:
    """Every worker's optimizer."""

    optimizer: InnerOptimizer = InnerOptimizer.muon
    """Algorithm of the inner updates: AdamW; SGD with or without momentum; Muon for the matrices between embeddings and
    output, and AdamW for all else (MuLoCo, 2505.23725)."""
    lr: Annotated[float | None, Range("> 0")] = None
    """Peak learning rate of one worker (inner.lr_scaling); of muon such that updates of a matrix are as large as
    adamw's (2502.16982). null: with muon, inversely to the width of its matrices, 5e-3 for the default model's of
    128 (docs/theory.md)."""
    other_lr_factor: Annotated[float, Range("> 0"), ReadWhen("inner.optimizer=muon")] = 1.0
    """Rate of what muon leaves to AdamW, over `lr`."""
    beta1: Annotated[float, Range("in [0, 1)"), ReadWhen(ADAMW)] = 0.9
    """Decay of adamw's running mean of gradients."""
    beta2: Annotated[float, Range("in [0, 1)"), ReadWhen(ADAMW)] = 0.95
    """Decay of adamw's running mean of squared gradients."""
    eps: Annotated[float, Range("> 0"), ReadWhen(ADAMW)] = 1e-8
    """Constant that adamw adds to the denominator of its updates."""
    momentum: Annotated[float, Range("in [0, 1)"), ReadWhen("inner.optimizer=sgd,muon")] = 0.8
    """Momentum of sgd and of muon."""
    weight_decay: Annotated[float, Range(">= 0")] = 0.01
    """Decoupled for adamw and muon, added to the gradient for sgd; never applied to vectors (norms, biases)."""
    clip_norm: Annotated[float | None, Range("> 0")] = 1.0
    """Maximum norm of a gradient; null: no clipping."""
    schedule: Schedule = Schedule.wsd
    """Course of the rate after the warm-up, while the budget is spent. wsd: constant at `lr`, at the end a linear decay
    (warm-up, stable, decay: 2404.06395). constant: at `lr` to the end. cosine: half a cosine."""
    warmup_fraction: Annotated[float, Range("in [0, 1), of the budget")] = 0.1
    """Share of the budget over which the rate rises linearly to `lr`, from a tenth of it."""
    decay_fraction: Annotated[
        float, Range("in (0, 1], of the budget (no decay: inner.schedule=constant)"), ReadWhen("inner.schedule=wsd")
    ] = 0.3
    """Share of the budget over which the rate decays at the end with wsd."""
    final_lr_fraction: Annotated[float, Range("in [0, 1]"), ReadWhen("inner.schedule=wsd,cosine")] = 0.1
    """Share of `lr` that wsd and cosine end at."""
    lr_scaling: RateScaling = RateScaling.sqrt
    """How the rate follows the number of workers that average: lr times that number, the root of it, or 1. It counts
    whole where they average at every update, and comes to one where they are apart for 40 updates. Batches that grow
    leave the rate as it is."""
    reset_each_round: Annotated[bool, ReadWhen(ADAMW), ReadWhen("inner.momentum>0")] = False
    """Whether inner moments start at zero in every round."""

    def __post_init__(self) -> None:
        rule = f"is found with inner.optimizer=muon alone; name a rate, or use inner={self.optimizer.value}"
        require(self.lr is not None or self.optimizer is InnerOptimizer.muon, "inner.lr", self.lr, rule)


@dataclass
class OuterSettings:
    """Every trainer's optimizer on its anchor."""

    lr: Annotated[float, Range("> 0"), ReadWhen(OUTER_STEPS)] = 1.0
    """Rate of the outer SGD on the anchor, whose gradient is the pseudo-gradient (DiLoCo, 2311.08105)."""
    momentum: Annotated[float, Range("in [0, 1)"), ReadWhen(OUTER_STEPS)] = 0.0
    """Nesterov momentum of the outer SGD; 0: none."""
    follows_workers: Annotated[bool, ReadWhen(OUTER_STEPS)] = True
    """Whether the rate is that of two workers, and of more that average times the cube root of half their number."""
    average_span: Annotated[float | None, Range("in (0, 1]")] = 0.1
    """Share of the tokens so far over which a trainer's anchors are averaged; the average is evaluated and saved. It
    takes a vector of the model's size, which merges alone send. null: the last anchor."""


@dataclass
class WireSettings:
    """How pseudo-gradients travel between the ranks of a trainer."""

    format: WireFormat = WireFormat.adaptive
    """fp32: as they are (fp64 with precision=fp64). bf16, int8, int4: rounded to 16, 8.125 or 4.125 bits, summed in
    fp32. signs: 1.125 bits, and what that takes away is added to the next pseudo-gradient (1-bit Adam, 2102.02888), for
    which each trainer of a rank keeps a vector of the model's size. sparse: the largest elements alone, in 2 bits each,
    with the same error feedback (SparseLoCo, 2508.15706). adaptive: int4, with error feedback, where the measured link
    is fast enough for that (with algorithm.round=link), and else signs."""
    fraction: Annotated[float, Range("in (0, 1]"), ReadWhen("wire.format=sparse")] = 0.015625
    """Share of the elements that sparse sends."""
    fragments: Annotated[int, Range(">= 1")] = 1
    """P: parts of a model that are averaged at different times of a round (Streaming DiLoCo, 2501.18512)."""
    delay_updates: Annotated[int | None, Range(">= 0")] = None
    """tau: updates that are computed while an average travels, before its outer step reaches the workers. 0: workers
    wait for it. null: as many as the measured link needs, 0 where averages are quick (with algorithm.round=link)."""

    @property
    def keeps_residual(self) -> bool:
        """Whether what compression takes away is added to the next pseudo-gradient (error feedback)."""
        return self.format in (WireFormat.signs, WireFormat.sparse, WireFormat.adaptive)

    @property
    def is_delayed(self) -> bool:
        """Whether updates are computed while averages travel."""
        return self.delay_updates is None or self.delay_updates > 0

    @property
    def is_streaming(self) -> bool:
        """Whether workers do not all stand at the anchor when a round begins."""
        return self.fragments > 1 or self.is_delayed
