"""Sequences per update and per pass: what asks for a batch, what bounds it, how a device takes it."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from adloco_dist.config.choices import BatchRequest, Estimator, GradientNorm, SwitchMode, Unmeasured
from adloco_dist.config.errors import require

MEASURED_REQUESTS = (
    BatchRequest.norm_test,
    BatchRequest.inner_product_test,
    BatchRequest.augmented_inner_product_test,
)
"""The requests that are tests on gradient statistics."""


@dataclass
class BatchingSettings:
    """Sequences per update. A request is a total batch, of all workers of a trainer together."""

    local_batch: int = 4
    """b of the first round: sequences per update of each worker."""
    request: BatchRequest = BatchRequest.norm_test
    """What asks for the next round's batch: a variance test, or none, ramp, staged, replay (open loop)."""
    eta: float = 0.8
    """Of norm_test: how much noise beside the gradient is accepted; a smaller eta asks for a larger batch."""
    theta: float = 0.9
    """Of inner_product_test and augmented_inner_product_test: noise accepted along the gradient."""
    nu: float = 5.84
    """Of augmented_inner_product_test: noise accepted across the gradient."""
    gradient_norm: GradientNorm = GradientNorm.unbiased
    """The squared gradient norm in the tests. unbiased: without the noise. plugin: that of the measured mean, noise
    included, as the AdLoCo paper's formula has it."""
    estimator: Estimator = Estimator.sketch
    """sketch: random projections of chunks, 66 kB per worker and round. workers: full gradients averaged over the
    workers. per_sequence: every sequence's own gradient (exact; memory and traffic of one gradient per sequence)."""
    chunks: int = 4
    """Most pieces that a worker's first batch of a round is cut into for the sketch (each of two sequences or more)."""
    smoothing: float = 0.9
    """Decay per round of the running averages of the statistics, in [0, 1)."""
    least_batch: int = 1
    """Least total batch of a trainer."""
    largest_batch: int | None = None
    """Largest total batch of a trainer; null: one epoch of its shard, which bounds it in any case."""
    growth_limit: float = 2.0
    """Largest factor by which a test may raise the total batch in one round."""
    may_shrink: bool = True
    """Whether a test may lower the batch."""
    unmeasured: Unmeasured = Unmeasured.keep
    """What to do where there is nothing to measure (one worker with one sequence): keep, or grow by growth_limit."""
    ramp_factor: float = 1.25
    """Of ramp: factor of the total batch per round."""
    stage_fractions: list[float] = field(default_factory=list)
    """Of staged: shares of the budget at which the stages begin, rising from 0."""
    stage_batches: list[int] = field(default_factory=list)
    """Of staged: total batch of each stage."""
    replay: str | None = None
    """Of replay: a run directory, or its metrics.jsonl, whose total batches and merges are repeated round by round."""
    capacity: int | None = None
    """Sequences that a rank's device takes in one pass; decides only how many passes a batch takes, and may differ
    between nodes. null: as many as fit into its memory (on a CPU: into cluster.memory_bytes)."""
    padding_fraction: float = 0.9
    """Share of the free memory that passes may fill, in (0, 1]."""

    def __post_init__(self) -> None:
        require(self.chunks >= 2, "batching.chunks", self.chunks, "must be >= 2: pieces are compared with each other")
        at_least_one = ("local_batch", "least_batch")
        for name in at_least_one:
            require(getattr(self, name) >= 1, f"batching.{name}", getattr(self, name), "must be >= 1")
        capacity = self.capacity
        require(capacity is None or capacity >= 1, "batching.capacity", capacity, "must be >= 1 sequence, or null")
        for name in ("eta", "theta", "nu"):
            require(0 < getattr(self, name) < inf, f"batching.{name}", getattr(self, name), "must be > 0")
        require(0 <= self.smoothing < 1, "batching.smoothing", self.smoothing, "must be in [0, 1)")
        for name in ("growth_limit", "ramp_factor"):
            require(1 < getattr(self, name) < inf, f"batching.{name}", getattr(self, name), "must be > 1")
        least, largest = self.least_batch, self.largest_batch
        if largest is not None:
            require(largest >= least, "batching.largest_batch", largest, f"must be >= batching.least_batch={least}")
        fraction = self.padding_fraction
        require(0 < fraction <= 1, "batching.padding_fraction", fraction, "must be in (0, 1]")
        self._check_open_loop()

    def _check_open_loop(self) -> None:
        fractions, batches = self.stage_fractions, self.stage_batches
        if self.request is BatchRequest.staged:
            rising = all(earlier < later for earlier, later in pairwise([*fractions, 1.0]))
            rule = "must rise from 0 and stay below 1, for example [0,0.3,0.6]"
            require(bool(fractions) and fractions[0] == 0 and rising, "batching.stage_fractions", fractions, rule)
            rule = f"must hold a total batch >= 1 for each of the {len(fractions)} fractions"
            fitting = len(batches) == len(fractions) and min(batches, default=0) >= 1
            require(fitting, "batching.stage_batches", batches, rule)
        if self.request is BatchRequest.replay:
            require(bool(self.replay), "batching.replay", self.replay, "name the run whose batches are repeated")
        belongs_to = {
            "stage_fractions": BatchRequest.staged,
            "stage_batches": BatchRequest.staged,
            "replay": BatchRequest.replay,
        }
        for name, request in belongs_to.items():
            value = getattr(self, name)
            rule = f"has no effect with batching.request={self.request.name}; set batching.request={request.name}"
            require(not value or self.request is request, f"batching.{name}", value, rule)


@dataclass
class SwitchSettings:
    """How a worker's batch above the batch limit b_max is taken (AdLoCo, section 4.2)."""

    mode: SwitchMode = SwitchMode.threshold
    """threshold: clip what a variance test asks for up to n b_max, accumulate above; batches that are given (none,
    ramp, staged, replay) are always accumulated. accumulate: never clip. clip: never accumulate."""
    n: int | float | str = 2.0
    """Of threshold: batches up to n b_max are clipped to b_max. auto: chosen by the measured progress per second."""
    batch_limit: int | None = None
    """b_max: the largest local batch that is taken in one pass. null: the least capacity of the trainer's ranks."""

    def __post_init__(self) -> None:
        limit = self.batch_limit
        require(limit is None or limit >= 1, "switch.batch_limit", limit, "must be >= 1 sequence, or null")
        valid = self.n == "auto" if isinstance(self.n, str) else 1 <= self.n < inf
        require(valid, "switch.n", self.n, "must be a number >= 1 (it multiplies the batch limit), or auto")
