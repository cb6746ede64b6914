"""Report and plan: every rank reports its round to rank 0, which decides the next one for all."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.profiler import record_function

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import Settings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import MergeReport, RankReport
from adloco_dist.policy.simulation import round_seconds, simulated
from adloco_dist.policy.summary import disagreements, pool_report, seat_reports


class Coordinator:
    """Decides on rank 0, and keeps there what the last plan was decided from.

    Attributes:
        reports: all seats' reports, on rank 0; none elsewhere, and none where a run resumes: they were recorded before.
        pool_report: the reports reduced to what the plan needs.
    """

    def __init__(
        self, settings: Settings, inputs: PlanInputs, seconds: float = 0.0, saved: PoolReport | None = None
    ) -> None:
        """
        Args:
            seconds: time on rank 0's clock that earlier starts of the run have taken.
            saved: the report from which a run that resumes between two rounds decides once more.
        """
        self.reports: Sequence[RankReport] = ()
        self.pool_report = PoolReport()
        self._settings, self._inputs, self._saved = settings, inputs, saved
        self._start, self._simulated_seconds = time.monotonic() - seconds, seconds

    @property
    def seconds(self) -> float:
        """Seconds on this rank's clock since the first round began, earlier starts included; or simulated ones."""
        return self._simulated_seconds if self._settings.simulation.is_on else time.monotonic() - self._start

    def plan_next(
        self, control: ControlPlane, report: RankReport, last: RoundPlan | None
    ) -> tuple[RoundPlan, RankReport]:
        """One gather and one broadcast: rank 0 decides the round after `last` by all ranks' reports, and its plan holds
        for all. Collective.

        Returns:
            The plan, and the rank's next report, which begins with the cost of this exchange.
        """
        next_report = RankReport(report.rank)
        with _added_cost(control, next_report):
            with record_function("report"):
                reports = [decode(RankReport, message) for message in control.gather(encode(report))]
            with record_function("plan"):
                message = encode(self._decide(reports, last)) if reports else None
                plan = decode(RoundPlan, control.broadcast(message))
            next_report.plan_digest = plan.digest()
        return plan, next_report

    def _decide(self, of_ranks: Sequence[RankReport], last: RoundPlan | None) -> RoundPlan:
        size = self._settings.pool.ranks_per_worker
        errors, reports = disagreements(of_ranks, size), seat_reports(of_ranks, size)
        if self._settings.simulation.is_on and last:
            reports = simulated(self._settings.simulation, self._settings.wire.fragments, last, reports)
            self._simulated_seconds = last.seconds + round_seconds(reports)
        self.reports, self.pool_report = reports, pool_report(reports, last, self.seconds, errors)
        if self._saved:  # the last round's, but for what a new start changes
            now = {name: getattr(self.pool_report, name) for name in ("errors", "stop_requested", "capacities")}
            nonfinite = self.pool_report.nonfinite
            self.reports, self.pool_report = (), replace(self._saved, **now, nonfinite=nonfinite)
            self._saved = None
        return plan_round(self._settings, self._inputs, last, self.pool_report)


def ask_all(control: ControlPlane, report: RankReport, is_coming: bool) -> Callable[[], bool]:
    """Ask whether all ranks are coming, before any enters a collective of the outer step; the function that is returned
    waits for the answer. Cost is added to the report."""
    sent = control.bytes_sent
    answer = control.start_all(is_coming)
    report.control_bytes_sent += control.bytes_sent - sent

    def wait() -> bool:
        with _added_cost(control, report), record_function("control"):
            return answer()

    return wait


def exchange_ends(control: ControlPlane, report: RankReport, ends: dict[int, Any]) -> dict[int, Any]:
    """Exchange what all ranks must know of the data that each has read, by stream; cost is added to the report."""
    with _added_cost(control, report), record_function("control"):
        replies = control.exchange({"ends": ends})
    return {int(stream): end for reply in replies for stream, end in reply["ends"].items()}


def merged_reports(control: ControlPlane, report: RankReport) -> MergeReport:
    """What all ranks have to report of the merges before this round, on rank 0; nothing elsewhere. Collective."""
    messages = control.gather(encode(report.merge))
    return sum((decode(MergeReport, message) for message in messages), MergeReport())


@contextmanager
def _added_cost(control: ControlPlane, report: RankReport) -> Iterator[None]:
    """Add the time and the bytes of the exchange in the block to a report."""
    start, sent = time.perf_counter(), control.bytes_sent
    yield
    report.control_seconds += time.perf_counter() - start
    report.control_bytes_sent += control.bytes_sent - sent
