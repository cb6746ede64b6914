"""Sequences per update and per micro-batch: what asks for a batch, what bounds it, how a device takes it."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Annotated

from adloco_dist.config.choices import BatchRequest, Estimator, GradientNorm, SwitchMode, Unmeasured
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ON_A_GPU, ReadWhen

MEASURED_REQUESTS = (
    BatchRequest.norm_test,
    BatchRequest.inner_product_test,
    BatchRequest.augmented_inner_product_test,
    BatchRequest.progress,
)
"""The requests that follow gradient statistics."""
ANY_TEST = "batching.request=norm_test,inner_product_test,augmented_inner_product_test"
ANY_MEASURED = f"{ANY_TEST},progress"


@dataclass
class BatchingSettings:
    """Sequences per update. A request is a total batch, of all workers of a trainer together."""

    local_batch: Annotated[
        int,
        ReadWhen("batching.request!=staged,replay"),
        ReadWhen("inner.batch_scaling!=none", "inner.reference_batch=null"),
    ] = 4
    """b of the first round: sequences per update of each worker."""
    request: BatchRequest = BatchRequest.norm_test
    """What asks for the next round's batch: a variance test; progress, the batch with the most progress per second; or
    none, ramp, staged, replay (open loop)."""
    eta: Annotated[float, ReadWhen(ANY_TEST)] = 0.8
    """Noise, relative to the gradient's norm, that norm_test accepts, > 0; a smaller eta asks for a larger batch."""
    theta: Annotated[float, ReadWhen("batching.request=inner_product_test,augmented_inner_product_test")] = 0.9
    """Noise along the gradient, relative to its norm, that inner_product_test and augmented_inner_product_test accept,
    > 0."""
    nu: Annotated[float, ReadWhen("batching.request=augmented_inner_product_test")] = 5.84
    """Noise across the gradient, relative to its norm, that augmented_inner_product_test accepts, > 0."""
    gradient_norm: Annotated[GradientNorm, ReadWhen(ANY_TEST)] = GradientNorm.unbiased
    """The squared gradient norm in the tests. unbiased: without the noise. plugin: that of the measured mean, noise
    included, as the AdLoCo paper's formula has it."""
    estimator: Annotated[Estimator, ReadWhen(ANY_MEASURED)] = Estimator.sketch
    """sketch: random projections of chunks, 66 kB per worker and round. workers: full gradients averaged over the
    workers. per_sequence: every sequence's own gradient (exact; memory and traffic of one gradient per sequence)."""
    every_updates: Annotated[int, ReadWhen(ANY_MEASURED)] = 40
    """Updates after which gradients are measured again, in the first update of a round; what it costs is the same
    whether rounds are short or long."""
    chunks: Annotated[int, ReadWhen(ANY_MEASURED, "batching.estimator=sketch")] = 4
    """Maximum number of pieces, >= 2, into which a worker's first batch of a round is cut for the sketch; each holds
    two sequences or more."""
    span: Annotated[float, ReadWhen(ANY_MEASURED)] = 0.15
    """Share of the tokens so far that running averages of the statistics span, at least three rounds, in [0, 1]; 0: the
    last round alone."""
    min_batch: int | None = None
    """Minimum total batch of a trainer; null: of what a test asks for, `local_batch` for each worker, else 1."""
    max_batch: int | None = None
    """Maximum total batch of a trainer; null: one epoch of its shard, which bounds it in any case."""
    growth_limit: Annotated[float, ReadWhen(ANY_MEASURED)] = 2.0
    """Maximum factor by which a test may raise the total batch after one measurement."""
    shrink_limit: Annotated[float, ReadWhen(ANY_MEASURED, "batching.may_shrink=true")] = 2.0
    """Maximum factor by which a test may lower the total batch after one measurement."""
    may_shrink: Annotated[bool, ReadWhen(ANY_MEASURED)] = True
    """Whether a test may lower the batch."""
    unmeasured: Annotated[Unmeasured, ReadWhen(ANY_MEASURED)] = Unmeasured.keep
    """What to do where there is nothing to measure (one worker with one sequence): keep, or grow by growth_limit."""
    ramp_factor: Annotated[float, ReadWhen("batching.request=ramp")] = 1.25
    """Factor by which request=ramp raises the total batch in every round, > 1."""
    stage_fractions: Annotated[list[float], ReadWhen("batching.request=staged")] = field(default_factory=list)
    """Shares of the budget, rising from 0, at which the stages of request=staged begin."""
    stage_batches: Annotated[list[int], ReadWhen("batching.request=staged")] = field(default_factory=list)
    """Total batch of each stage of request=staged."""
    replay: Annotated[str | None, ReadWhen("batching.request=replay")] = None
    """Run directory, or its metrics.jsonl, whose total batches and merges request=replay repeats, round by round."""
    capacity: int | None = None
    """Sequences that a rank's device takes in one micro-batch; decides only how many micro-batches a batch takes, and
    may differ between nodes. null: as many as fit into its memory (on a CPU: into cluster.memory_bytes)."""
    padding_fraction: Annotated[
        float, ReadWhen("batching.capacity=null"), ReadWhen(ON_A_GPU, "instances.resident=null")
    ] = 0.9
    """Share of the free memory that micro-batches may fill, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise SettingsError.of("batching.chunks", self.chunks, "must be >= 2: pieces are compared with each other")
        if self.every_updates < 1:
            raise SettingsError.of("batching.every_updates", self.every_updates, "must be >= 1")
        if self.local_batch < 1:
            raise SettingsError.of("batching.local_batch", self.local_batch, "must be >= 1")
        if self.min_batch is not None and self.min_batch < 1:
            raise SettingsError.of("batching.min_batch", self.min_batch, "must be >= 1, or null")
        capacity = self.capacity
        if capacity is not None and capacity < 1:
            raise SettingsError.of("batching.capacity", capacity, "must be >= 1 sequence, or null")
        for name in ("eta", "theta", "nu"):
            if not 0 < getattr(self, name) < inf:
                raise SettingsError.of(f"batching.{name}", getattr(self, name), "must be > 0")
        if not 0 <= self.span <= 1:
            raise SettingsError.of("batching.span", self.span, "must be in [0, 1]")
        for name in ("growth_limit", "shrink_limit", "ramp_factor"):
            if not 1 < getattr(self, name) < inf:
                raise SettingsError.of(f"batching.{name}", getattr(self, name), "must be > 1")
        minimum, largest = self.min_batch or 1, self.max_batch
        if largest is not None and largest < minimum:
            raise SettingsError.of("batching.max_batch", largest, f"must be >= batching.min_batch={minimum}")
        fraction = self.padding_fraction
        if not 0 < fraction <= 1:
            raise SettingsError.of("batching.padding_fraction", fraction, "must be in (0, 1]")
        self._check_open_loop()

    def _check_open_loop(self) -> None:
        fractions, batches = self.stage_fractions, self.stage_batches
        if self.request is BatchRequest.staged:
            rising = all(earlier < later for earlier, later in pairwise([*fractions, 1.0]))
            rule = "must rise from 0 and stay below 1, for example [0,0.3,0.6]"
            if not fractions or fractions[0] != 0 or not rising:
                raise SettingsError.of("batching.stage_fractions", fractions, rule)
            rule = f"must hold a total batch >= 1 for each of the {len(fractions)} fractions"
            fitting = len(batches) == len(fractions) and min(batches, default=0) >= 1
            if not fitting:
                raise SettingsError.of("batching.stage_batches", batches, rule)
        if self.request is BatchRequest.replay and not self.replay:
            raise SettingsError.of("batching.replay", self.replay, "name the run whose batches are repeated")
        belongs_to = {
            "stage_fractions": BatchRequest.staged,
            "stage_batches": BatchRequest.staged,
            "replay": BatchRequest.replay,
        }
        for name, request in belongs_to.items():
            value = getattr(self, name)
            rule = f"has no effect with batching.request={self.request.name}; set batching.request={request.name}"
            if value and self.request is not request:
                raise SettingsError.of(f"batching.{name}", value, rule)


@dataclass
class SwitchSettings:
    """How a worker's batch above the batch limit b_max is taken (AdLoCo, section 4.2)."""

    mode: SwitchMode = SwitchMode.threshold
    """threshold: clip what a variance test asks for up to n b_max, accumulate above; batches that are given (none,
    ramp, staged, replay) are always accumulated. accumulate: never clip. clip: never accumulate."""
    n: Annotated[int | float | str, ReadWhen(ANY_MEASURED, "switch.mode=threshold")] = 2.0
    """Multiple of b_max up to which mode=threshold clips a batch to b_max, >= 1. auto: chosen by the measured progress
    per second."""
    batch_limit: int | None = None
    """b_max: the largest local batch that is taken in one micro-batch. null: the smallest capacity of the
    trainer's ranks."""

    def __post_init__(self) -> None:
        limit = self.batch_limit
        if limit is not None and limit < 1:
            raise SettingsError.of("switch.batch_limit", limit, "must be >= 1 sequence, or null")
        valid = self.n == "auto" if isinstance(self.n, str) else 1 <= self.n < inf
        if not valid:
            raise SettingsError.of("switch.n", self.n, "must be a number >= 1 (it multiplies the batch limit), or auto")
