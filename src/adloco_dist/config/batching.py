"""Sequences per update and per micro-batch: what asks for a batch, what bounds it, how a device takes it."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Annotated, Any

from adloco_dist.config.choices import BatchRequest, GradientNorm, Unmeasured
from adloco_dist.config.errors import require
from adloco_dist.config.marks import ON_A_GPU, Range, ReadWhen

OPEN_LOOP = (BatchRequest.none, BatchRequest.ramp, BatchRequest.staged, BatchRequest.replay)
"""The requests that do not follow gradient statistics."""
ANY_TEST = "batching.request=norm_test,inner_product_test,augmented_inner_product_test"
INNER_PRODUCT_TESTS = "batching.request=inner_product_test,augmented_inner_product_test"
ANY_MEASURED = f"{ANY_TEST},progress"


@dataclass
class BatchingSettings:
    """Sequences per update. A request is a total batch, of all workers of a trainer together."""

    local_batch: Annotated[int, Range(">= 1"), ReadWhen("batching.request!=staged,replay")] = 4
    """b of the first round: sequences per update of each worker."""
    request: BatchRequest = BatchRequest.progress
    """What asks for the next round's batch: a variance test; progress, the batch with the most progress per second; or
    none, ramp, staged, replay (open loop)."""
    eta: Annotated[float, Range("> 0"), ReadWhen(ANY_TEST)] = 0.8
    """Noise, relative to the gradient's norm, that norm_test accepts; a smaller eta asks for a larger batch."""
    theta: Annotated[float, Range("> 0"), ReadWhen(INNER_PRODUCT_TESTS)] = 0.9
    """Noise along the gradient, relative to its norm, that both inner-product tests accept."""
    nu: Annotated[float, Range("> 0"), ReadWhen("batching.request=augmented_inner_product_test")] = 5.84
    """Noise across the gradient, relative to its norm, that augmented_inner_product_test accepts."""
    gradient_norm: Annotated[GradientNorm, ReadWhen(ANY_TEST)] = GradientNorm.unbiased
    """The squared gradient norm in the tests. unbiased: without the noise. plugin: that of the measured mean, noise
    included, as the AdLoCo paper's formula has it."""
    every_updates: Annotated[int, Range(">= 1"), ReadWhen(ANY_MEASURED)] = 40
    """Updates after which gradients are measured again, in the first update of a round, however long rounds are."""
    span: Annotated[float, Range("in [0, 1]"), ReadWhen(ANY_MEASURED)] = 0.15
    """Share of the tokens so far that running averages of the statistics span, at least three rounds; 0: the last."""
    min_batch: Annotated[int | None, Range(">= 1")] = None
    """Minimum total batch of a trainer; null: of what a test asks for, `local_batch` for each worker, else 1."""
    max_batch: int | None = None
    """Maximum total batch of a trainer; null: one epoch of its shard, which bounds it in any case."""
    growth_limit: Annotated[float, Range("> 1"), ReadWhen(ANY_MEASURED)] = 2.0
    """Maximum factor by which a test may raise the total batch after one measurement."""
    shrink_limit: Annotated[float, Range(">= 1; 1 never lowers a batch"), ReadWhen(ANY_MEASURED)] = 2.0
    """Maximum factor by which a test may lower the total batch after one measurement."""
    unmeasured: Annotated[Unmeasured, ReadWhen(ANY_MEASURED)] = Unmeasured.keep
    """What to do where there is nothing to measure (one worker with one sequence): keep, or grow by growth_limit."""
    ramp_factor: Annotated[float, Range("> 1"), ReadWhen("batching.request=ramp")] = 1.25
    """Factor by which request=ramp raises the total batch in every round."""
    stages: Annotated[list[list[Any]], ReadWhen("batching.request=staged")] = field(default_factory=list)
    """Stages of request=staged, [[0,16],[0.3,64]] for example: the share of the budget at which each begins, rising
    from 0, and its total batch."""
    replay: Annotated[str | None, ReadWhen("batching.request=replay")] = None
    """Run directory, or its metrics.jsonl, whose total batches and merges request=replay repeats, round by round."""
    switch_n: Annotated[int | float | str | None, ReadWhen(ANY_MEASURED)] = 2.0
    """n of switch mode (AdLoCo, section 4.2): what a test asks for above b_max, the smallest `capacity` of a trainer's
    ranks, is clipped to b_max up to n b_max, and accumulated in several micro-batches above; >= 1, and 1 never clips.
    null: always clipped. auto: chosen by the measured progress per second. Batches that are given (none, ramp, staged,
    replay) are always accumulated."""
    capacity: Annotated[int | None, Range(">= 1 sequence")] = None
    """Sequences that a rank's device takes in one micro-batch; may differ between nodes. null: as many as fit into its
    memory (on a CPU: into cluster.memory_bytes)."""
    padding_fraction: Annotated[
        float, Range("in (0, 1]"), ReadWhen("batching.capacity=null"), ReadWhen(ON_A_GPU, "instances.resident=null")
    ] = 0.9
    """Share of the free memory that micro-batches may fill."""

    @property
    def measures_gradients(self) -> bool:
        """Whether the batch follows gradient statistics."""
        return self.request not in OPEN_LOOP

    @property
    def measures_times(self) -> bool:
        """Whether a batch is weighed against what its computation takes."""
        return self.switch_n == "auto" or self.request is BatchRequest.progress

    def __post_init__(self) -> None:
        n, minimum, largest = self.switch_n, self.min_batch or 1, self.max_batch
        is_possible = n in (None, "auto") or (not isinstance(n, str) and 1 <= n < inf)
        require(is_possible, "batching.switch_n", n, "must be a number >= 1 (it multiplies b_max), auto, or null")
        rule = f"must be >= batching.min_batch={minimum}"
        require(largest is None or largest >= minimum, "batching.max_batch", largest, rule)
        if self.request is BatchRequest.staged:
            are_pairs = all(
                len(stage) == 2 and type(stage[0]) in (int, float) and type(stage[1]) is int and 1 <= stage[1] < 2**64
                for stage in self.stages
            )
            begins = [stage[0] for stage in self.stages] if are_pairs else []
            is_rising = begins[:1] == [0] and all(earlier < later for earlier, later in pairwise([*begins, 1.0]))
            rule = "must be pairs of a share of the budget, rising from 0 and below 1, and a total batch >= 1"
            require(is_rising, "batching.stages", self.stages, f"{rule}, for example [[0,16],[0.3,64]]")
        is_named = self.request is not BatchRequest.replay or bool(self.replay)
        require(is_named, "batching.replay", self.replay, "name the run whose batches are repeated")
        for request, name in ((BatchRequest.staged, "stages"), (BatchRequest.replay, "replay")):
            value = getattr(self, name)
            rule = f"has no effect with batching.request={self.request.name}; set batching.request={request.name}"
            require(not value or self.request is request, f"batching.{name}", value, rule)
