"""The batch of one trainer for one round, and why it is what it is (docs/theory.md, "What is asked for")."""

import math
from dataclasses import dataclass

from adloco_dist.config import MEASURED_REQUESTS, BatchingSettings, BatchRequest, Settings, SwitchMode, Unmeasured
from adloco_dist.noise.requests import Request, progress_per_second
from adloco_dist.noise.statistics import GradientStatistics, Smoothed
from adloco_dist.policy.link import worth_of_averaging
from adloco_dist.policy.request import bound_change, bound_size, staged_request, variance_test_request
from adloco_dist.policy.switch import automatic_n, switch

MAX_SEQUENCES = 1 << 20
"""Maximum of a total batch, where no shard bounds it."""
PAPER_N = 2.0
"""The n of AdLoCo's switch mode, which switch.n=auto starts with."""


@dataclass(frozen=True)
class BatchReport:
    """What a trainer measured in a round."""

    statistics: GradientStatistics | None = None
    """Gradient statistics of the round; None: there was nothing to measure."""
    compute_seconds_per_sequence: float = 0.0
    """Time of the slowest of its ranks, for all its workers there; 0: not measured."""
    seconds_per_update: float = 0.0
    """The round's wall time without evaluations, divided by its updates."""

    exposed_share: float | None = None
    """Share of the round that averages took, and all else but updates and evaluations; None: not measured."""

    is_measured: bool = True
    """Whether the round was to measure them: not every round is."""

    def fixed_seconds(self, local_batch: int) -> float:
        """What an update took whatever its batch: optimizer, its share of averages, waiting, other trainers' turns."""
        return max(0.0, self.seconds_per_update - local_batch * self.compute_seconds_per_sequence)


@dataclass(frozen=True)
class BatchPlan:
    """One trainer's batch in one round."""

    request: float
    """Total batch that was asked for, before bounds; infinite if only noise was measured."""
    bounded: float
    """Total batch after the bounds; the next round's growth counts from it."""
    bound: str | None
    """The setting that the request met, or `shard`, or `measurable`."""
    local_batch: int
    """b: sequences per update of each worker, as the updates take them."""
    mode: str
    """whole, clipped or accumulated."""
    batch_limit: int | None
    """b_max; None: any batch is taken in one micro-batch."""
    switch_n: float
    note: str | None
    """What a user should know about this batch."""
    smoothed: Smoothed
    """The statistics that the request stands on."""
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


@dataclass(frozen=True)
class Spent:
    """How far the run has come when batches are planned."""

    fraction: float
    """Share of the budget that is spent."""
    tokens: int = 0
    """Tokens that the whole pool has trained on."""


@dataclass(frozen=True)
class BatchTarget:
    """The total batch of a trainer's next round, before it is divided among workers."""

    request: Request
    bounded: float
    bound: str | None
    smoothed: Smoothed


def first_target(settings: Settings, inputs: BatchInputs, replayed: int | None = None) -> BatchTarget:
    """What the first round is to take, before anything was measured.

    Args:
        replayed: the total batch that batching.request=replay repeats.
    """
    batching = settings.batching
    request = float(inputs.num_workers * batching.local_batch)
    if batching.request is BatchRequest.staged:
        request = staged_request(batching, 0.0)
    elif replayed is not None:
        request = float(replayed)
    bounded, bound = bound_size(batching, request, inputs.num_workers, inputs.shard_sequences)
    return BatchTarget(Request(request), bounded, bound, Smoothed())


def next_target(
    settings: Settings, inputs: BatchInputs, last: BatchPlan, report: BatchReport, replayed: int | None,
    spent: Spent,
) -> BatchTarget:  # fmt: skip
    """What the next round is to take, from the last batch and what was measured in it.

    Args:
        replayed: as in `first_target`.
    """
    batching, smoothed, change_bound = settings.batching, last.smoothed, None
    if settings.measures_gradients and not report.is_measured:
        # Else a batch would change by its bounds in every round, however short, on one and the same measurement.
        return BatchTarget(Request(last.request, last.note), last.bounded, last.bound, smoothed)
    match batching.request:
        case BatchRequest.none:
            request = Request(last.bounded)
        case BatchRequest.ramp:
            request = Request(batching.ramp_factor * last.bounded)
        case BatchRequest.staged:
            request = Request(staged_request(batching, spent.fraction))
        case BatchRequest.replay:
            # The plan that stops the run stands one round after the last that was recorded.
            request = Request(last.bounded if replayed is None else float(replayed))
        case _:
            request, smoothed = _tested(settings, inputs, last, report, spent)
    wanted = request.sequences
    if settings.measures_gradients:
        wanted, change_bound = bound_change(batching, wanted, last.bounded)
    bounded, size_bound = bound_size(batching, wanted, inputs.num_workers, inputs.shard_sequences)
    return BatchTarget(request, bounded, size_bound or change_bound, smoothed)


def _tested(
    settings: Settings, inputs: BatchInputs, last: BatchPlan, report: BatchReport, spent: Spent
) -> tuple[Request, Smoothed]:
    """What the statistics ask for, on averages that include this round; the last batch where nothing is known."""
    batching, measured, smoothed = settings.batching, report.statistics, last.smoothed
    if measured is None:
        if batching.unmeasured is Unmeasured.grow:
            return Request(math.inf, "nothing to measure with one gradient: the batch grows by its bound"), smoothed
        return Request(last.bounded, "nothing to measure with one gradient: the batch stays"), smoothed
    if not measured.is_finite:
        return Request(last.bounded, "statistics are not finite: the batch stays"), smoothed
    smoothed = smoothed.after(measured, spent.tokens, batching.span)
    assert smoothed.statistics is not None
    if batching.request is not BatchRequest.progress:
        return variance_test_request(batching, smoothed.statistics), smoothed
    if report.compute_seconds_per_sequence <= 0:
        return Request(last.bounded, "no times were measured: the batch stays"), smoothed
    num_workers = inputs.effective_workers or inputs.num_workers
    times = report.compute_seconds_per_sequence, report.fixed_seconds(last.local_batch)
    return progress_per_second(smoothed.statistics, num_workers, *times), smoothed


def take(
    settings: Settings, inputs: BatchInputs, target: BatchTarget, last: BatchPlan | None, report: BatchReport
) -> BatchPlan:
    """Divide the total batch among the workers and let switch mode decide how it is taken."""
    # Once more, for the workers and the shard that a merge has left it.
    bounded, bound = bound_size(settings.batching, target.bounded, inputs.num_workers, inputs.shard_sequences)
    bound = bound or target.bound
    wanted = _local(settings.batching, inputs, bounded)
    mode = settings.switch.mode
    if mode is SwitchMode.threshold and not settings.measures_gradients:
        mode = SwitchMode.accumulate  # a batch that was given, not estimated, is taken as it is
    n = settings.switch.n
    if isinstance(n, str):
        automatic = _automatic_n(wanted, inputs, target.smoothed, last, report) if last else None
        n = PAPER_N if automatic is None else automatic
    switched = switch(wanted, inputs.batch_limit, mode, n)
    note = target.request.note
    if bound == "shard":
        note = f"the batch is capped at {bounded:.0f} sequences, one epoch of the trainer's shard"
    worth = None
    if report.exposed_share is not None and inputs.num_workers > 1:
        scale = target.smoothed.statistics.noise_scale if target.smoothed.statistics else math.inf
        worth = worth_of_averaging(report.exposed_share, inputs.num_workers, switched.batch, scale)
    return BatchPlan(
        request=target.request.sequences,
        bounded=bounded,
        bound=bound,
        local_batch=switched.batch,
        mode=switched.mode,
        batch_limit=inputs.batch_limit,
        switch_n=float(n),
        note=note,
        smoothed=target.smoothed,
        worth=worth,
    )


def max_local_batch(batching: BatchingSettings, num_workers: int, shard_sequences: int | None) -> int:
    """The largest b that a trainer can come to: no update takes a sequence of its shard twice.

    Args:
        shard_sequences: None: unknown, of a stream.
    """
    largest = MAX_SEQUENCES if shard_sequences is None else shard_sequences // num_workers
    if batching.max_batch is not None:
        largest = min(largest, -(-batching.max_batch // num_workers))
    return max(1, largest)


def _local(batching: BatchingSettings, inputs: BatchInputs, total: float) -> int:
    """b = ceil(B / M), within `max_local_batch`; of what a variance test asks of unequal workers, ceil(B sum p^2)."""
    num_workers = inputs.effective_workers if batching.request in MEASURED_REQUESTS else None
    local_batch = max(1, math.ceil(min(total, MAX_SEQUENCES) / (num_workers or inputs.num_workers)))
    return min(local_batch, max_local_batch(batching, inputs.num_workers, inputs.shard_sequences))


def _automatic_n(
    batch: int, inputs: BatchInputs, smoothed: Smoothed, last: BatchPlan, report: BatchReport
) -> float | None:
    """The n of switch.n=auto; None where it has no effect or its measurements are missing."""
    limit = inputs.batch_limit
    if limit is None or batch <= limit or smoothed.statistics is None or report.compute_seconds_per_sequence <= 0:
        return None
    fixed_seconds = report.fixed_seconds(last.local_batch)
    noise_scale = smoothed.statistics.noise_scale / inputs.num_workers
    return automatic_n(batch, limit, noise_scale, limit * report.compute_seconds_per_sequence, fixed_seconds)
