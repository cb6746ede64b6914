"""The batch of one trainer for one round, and why it is what it is (docs/theory.md, "What is asked for")."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from adloco_dist.config import BatchingSettings, BatchRequest, InnerOptimizer, Unmeasured
from adloco_dist.noise.requests import Request, progress_per_second
from adloco_dist.noise.statistics import GradientStatistics, Smoothed
from adloco_dist.policy.link import worth_of_averaging
from adloco_dist.policy.passes import PassCost, Passes, fit, remembered
from adloco_dist.policy.request import automatic_n, bound_change, bound_size, switch, variance_test_request

MAX_SEQUENCES = 1 << 20
"""Maximum of a total batch, where no shard bounds it."""
NOISE_BORNE = {InnerOptimizer.muon: 4.0}
"""By inner optimizer, the noise scale that its batches follow, over that of gradients; of others 1. At equal tokens a
larger batch costs Muon mostly a third to a tenth of what it costs AdamW (docs/theory.md, "What is asked for")."""
PAPER_N = 2.0
"""The n of AdLoCo's switch mode, which batching.switch_n=auto starts with."""


@dataclass(frozen=True)
class BatchReport:
    """What a trainer measured in a round."""

    statistics: GradientStatistics | None = None
    """Gradient statistics of the round; None: there was nothing to measure."""
    passes: Sequence[Passes] = ()
    """What its passes took on the slowest of its ranks."""
    seconds_per_update: float = 0.0
    """The round's wall time without evaluations, divided by its updates."""
    exposed_share: float | None = None
    """Share of the round that averages took, and all else but updates and evaluations; None: not measured."""
    drift_factor: float = 1.0
    """Factor by which the updates to a loss are more, as workers drift apart in a round."""
    is_measured: bool = True
    """Whether the round was to measure them: not every round is."""
    local_batch: int = 0
    """b of the round."""


@dataclass(frozen=True)
class BatchTarget:
    """The total batch of a trainer's next round, before it is divided among workers."""

    request: float
    """Total batch that was asked for, before bounds; infinite if only noise was measured."""
    bounded: float
    """Total batch after the bounds; the next round's growth counts from it."""
    bound: str | None
    """The setting that the request met, or `shard`, or `measurable`."""
    note: str | None
    """What a user should know about this batch."""
    smoothed: Smoothed
    """The statistics that the request stands on."""
    passes: tuple[Passes, ...] = field(default=(), kw_only=True)
    """The timed passes that it stands on."""


@dataclass(frozen=True)
class BatchPlan(BatchTarget):
    """One trainer's batch in one round."""

    local_batch: int
    """b: sequences per update of each worker, as the updates take them."""
    mode: str
    """whole, clipped or accumulated."""
    batch_limit: int | None
    """b_max, the smallest capacity of the trainer's ranks; None: any batch is taken in one micro-batch."""
    switch_n: float | None
    """n of switch mode, as it was applied; None: every batch above the limit is clipped."""
    worth: float | None = None
    """Progress per second over that of one worker alone, at most; None: not known, or there is one worker."""


@dataclass(frozen=True)
class BatchInputs:
    """What stands fast about a trainer when its batch is planned."""

    num_workers: int
    shard_sequences: int | None = None
    """Sequences in its shard; None: not bounded by it."""
    batch_limit: int | None = None
    effective_workers: float | None = None
    """Equal workers that would average as much noise away as these; None: they are equal."""
    optimizer: InnerOptimizer = InnerOptimizer.adamw

    def noise_scale(self, statistics: GradientStatistics) -> float:
        """B_noise as updates of this optimizer bear it, in sequences; infinite if only noise was measured."""
        return NOISE_BORNE.get(self.optimizer, 1.0) * statistics.noise_scale


def next_target(
    batching: BatchingSettings,
    inputs: BatchInputs,
    last: BatchPlan | None,
    report: BatchReport,
    replayed: int | None,
    spent_fraction: float,
    tokens: int,
) -> BatchTarget:
    """What the next round is to take, from the last batch and what was measured in it.

    Args:
        last: None: the round is the first, and nothing was measured.
        report: of an earlier round, which took `report.local_batch`.
        replayed: the total batch that batching.request=replay repeats; None: none was recorded, as of the plan that
            stops the run, one round after the last.
        spent_fraction, tokens: share of the budget, and tokens of the whole pool, that are spent.
    """
    measures = batching.measures_gradients and last is not None
    if last and measures and not report.is_measured:
        # Else a batch would change by its bounds in every round, however short, on one and the same measurement.
        return last
    held = last.bounded if last else float(inputs.num_workers * batching.local_batch)
    passes = remembered(last.passes if last else (), report.passes)
    request, smoothed, change_bound = Request(held), last.smoothed if last else Smoothed(), None
    if batching.request is BatchRequest.staged:
        request = Request(float([batch for begin, batch in batching.stages if begin <= spent_fraction][-1]))
    elif batching.request is BatchRequest.replay and replayed is not None:
        request = Request(float(replayed))
    elif batching.request is BatchRequest.ramp and last:
        request = Request(batching.ramp_factor * held)
    elif last and measures:
        request, smoothed = _tested(batching, inputs, last, report, fit(passes), tokens)
    wanted = request.sequences
    if measures:
        wanted, change_bound = bound_change(batching, wanted, held)
    bounded, size_bound = bound_size(batching, wanted, inputs.num_workers, inputs.shard_sequences)
    return BatchTarget(request.sequences, bounded, size_bound or change_bound, request.note, smoothed, passes=passes)


def _tested(
    batching: BatchingSettings, inputs: BatchInputs, last: BatchPlan, report: BatchReport, cost: PassCost | None,
    tokens: int,
) -> tuple[Request, Smoothed]:  # fmt: skip
    """What the statistics ask for, on averages that include this round; the last batch where nothing is known."""
    measured, smoothed = report.statistics, last.smoothed
    if measured is None and batching.unmeasured is Unmeasured.grow:
        return Request(math.inf, "nothing to measure with one gradient: the batch grows by its bound"), smoothed
    if measured is None:
        return Request(last.bounded, "nothing to measure with one gradient: the batch stays"), smoothed
    if not measured.is_finite:
        return Request(last.bounded, "statistics are not finite: the batch stays"), smoothed
    smoothed = smoothed.after(measured, tokens, batching.span)
    assert smoothed.statistics is not None
    if batching.request is not BatchRequest.progress:
        return variance_test_request(batching, smoothed.statistics), smoothed
    if cost is None:
        return Request(last.bounded, "no times were measured: the batch stays"), smoothed
    if smoothed.statistics.squared_norm <= 0:  # one measurement far off does that: no reason for any batch
        return Request(last.bounded, "no gradient was seen for its noise: the batch stays"), smoothed
    num_workers = inputs.effective_workers or inputs.num_workers
    fixed = report.seconds_per_update - report.local_batch * cost.sequence_seconds
    noise_scale = inputs.noise_scale(smoothed.statistics)
    return progress_per_second(noise_scale, num_workers, cost.sequence_seconds, fixed), smoothed


def take(
    batching: BatchingSettings, inputs: BatchInputs, target: BatchTarget, last: BatchPlan | None, report: BatchReport
) -> BatchPlan:
    """Divide the total batch among the workers and let switch mode decide how it is taken."""
    # Once more, for the workers and the shard that a merge has left it.
    bounded, bound = bound_size(batching, target.bounded, inputs.num_workers, inputs.shard_sequences)
    bound = bound or target.bound
    # b = ceil(B / M); of what a variance test asks of unequal workers, ceil(B sum p^2).
    num_workers = (batching.measures_gradients and inputs.effective_workers) or inputs.num_workers
    wanted = max(1, math.ceil(min(bounded, MAX_SEQUENCES) / num_workers))
    wanted = min(wanted, max_local_batch(batching, inputs.num_workers, inputs.shard_sequences))
    # A batch that was given, not estimated, is taken as it is.
    n = batching.switch_n if batching.measures_gradients else 1.0
    if isinstance(n, str):
        n = _measured_n(wanted, inputs, target, last, report)
    local_batch, mode = switch(wanted, inputs.batch_limit, n)
    note = target.note
    if bound == "shard":
        note = f"the batch is capped at {bounded:.0f} sequences, one epoch of the trainer's shard"
    worth = None
    if report.exposed_share is not None and inputs.num_workers > 1:
        scale = inputs.noise_scale(target.smoothed.statistics) if target.smoothed.statistics else math.inf
        useful = (1 - report.exposed_share) / report.drift_factor
        worth = worth_of_averaging(useful, inputs.effective_workers or inputs.num_workers, local_batch, scale)
    return BatchPlan(
        request=target.request,
        bounded=bounded,
        bound=bound,
        note=note,
        smoothed=target.smoothed,
        passes=target.passes,
        local_batch=local_batch,
        mode=mode,
        batch_limit=inputs.batch_limit,
        switch_n=None if n is None else float(n),
        worth=worth,
    )


def max_local_batch(batching: BatchingSettings, num_workers: int, shard_sequences: int | None) -> int:
    """The largest b that a trainer can come to: no update takes a sequence of its shard twice. None: a stream's."""
    largest = MAX_SEQUENCES if shard_sequences is None else shard_sequences // num_workers
    if batching.max_batch is not None:
        largest = min(largest, -(-batching.max_batch // num_workers))
    return max(1, largest)


def _measured_n(
    batch: int, inputs: BatchInputs, target: BatchTarget, last: BatchPlan | None, report: BatchReport
) -> float:
    """The n of batching.switch_n=auto; that of the paper where it has no effect or its measurements are missing."""
    limit, statistics, cost = inputs.batch_limit, target.smoothed.statistics, fit(target.passes)
    if last is None or limit is None or batch <= limit or statistics is None or cost is None:
        return PAPER_N
    fixed = report.seconds_per_update - cost.seconds(-(-report.local_batch // limit), report.local_batch)
    noise_scale = inputs.noise_scale(statistics) / inputs.num_workers
    return automatic_n(batch, limit, noise_scale, cost.seconds(1, limit), max(0.0, fixed))
