"""Report and plan: every rank reports its rounds to rank 0, which decides later ones for all, while all compute."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from torch.profiler import record_function

from adloco_dist.cluster.control import ControlPlane, Message
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import GradientNorm, Settings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import MergeReport, RankReport
from adloco_dist.policy.simulation import round_seconds, simulated
from adloco_dist.policy.summary import disagreements, pool_report, seat_reports
from adloco_dist.pool.estimator import with_statistics


@dataclass(frozen=True)
class Decision:
    """A plan, and what rank 0 has decided it from."""

    plan: RoundPlan
    found: PoolReport | None
    """None: nothing was known yet."""
    reports: Sequence[RankReport] = ()
    """All seats'; none where a run resumes, whose records have them."""
    reported: RoundPlan | None = None
    """The plan of the round that they are about; None: of the state before training."""


class Coordinator:
    """Hands in this rank's reports, and takes the plans that rank 0 decides from all ranks' reports.

    Nobody waits for either, unless it is late: the reports of a round decide the plan of the round after the next one,
    and travel while that is computed. A thread of each rank sends and receives; that of rank 0 decides, and records.
    """

    def __init__(
        self,
        settings: Settings,
        inputs: PlanInputs,
        runtime: Runtime,
        record: Callable[[Decision], None],
        plan: RoundPlan | None = None,
        found: PoolReport | None = None,
        seconds: float = 0.0,
    ) -> None:
        """
        Args:
            record: takes every decision, on rank 0, in its thread; before anybody acts on it.
            plan: that of the round in which the run resumes; None: it begins.
            found: what the plan after that is decided from; None: nothing is known yet.
            seconds: time on rank 0's clock that earlier starts of the run have taken.
        """
        self._settings, self._inputs, self._rank, self._mail = settings, inputs, runtime.rank, runtime.mail
        self._record = record
        self._start, self._ended_seconds = time.monotonic() - seconds, found.seconds if found else 0.0
        """The latter is rank 0's clock at the end of the last round that was reported."""
        self._plans = [] if plan is None else [plan]
        """The last two."""
        self._handed_in: SimpleQueue[RankReport | None] = SimpleQueue()
        self._decided: SimpleQueue[tuple[RoundPlan, PoolReport | None] | BaseException] = SimpleQueue()
        self._following: RoundPlan | None = None
        self._control_bytes = self._control_bytes_reported = 0
        """What the thread has sent so far beside sketches, which are counted apart."""
        self._thread = threading.Thread(target=self._run, name="plans", daemon=True)
        # What the last start has seen is nothing that this one should end for.
        self._resumed = self.found = found and replace(found, errors=(), nonfinite=frozenset())
        """What the newest plan was decided from, on rank 0; None: nothing was known yet."""

    def __enter__(self) -> "Coordinator":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handed_in.put(None)
        if error is None:  # else a message may never come
            self._thread.join()

    @property
    def seconds(self) -> float:
        """Seconds on this rank's clock since the first round began, earlier starts included; or simulated ones, on rank
        0, up to the last round that was reported."""
        return self._ended_seconds if self._settings.simulation.is_on else time.monotonic() - self._start

    def hand_in(self, report: RankReport) -> None:
        """Let this rank's report of the round that has ended travel."""
        report.seconds = self.seconds
        sent = self._control_bytes
        report.control_bytes_sent += sent - self._control_bytes_reported
        self._control_bytes_reported = sent
        self._handed_in.put(report)

    def next_plan(self) -> tuple[RoundPlan, RankReport]:
        """The plan of the next round, and this rank's report of it, which begins with the time that the plan was late.

        What the thread has raised is raised here.
        """
        report = RankReport(self._rank)
        plan, self._following = self.following(report), None
        report.plan_digest = plan.digest()
        return plan, report

    @record_function("plan")
    def following(self, report: RankReport) -> RoundPlan:
        """The plan after this round, before its time: all reports of the last round have come then, and agree, or it
        says that they do not. The time that it takes is added to a report."""
        if self._following is None:
            start = time.perf_counter()
            decided = self._decided.get()
            report.control_seconds += time.perf_counter() - start
            if isinstance(decided, BaseException):
                raise decided
            self._following, self.found = decided
        return self._following

    def newest(self) -> PoolReport | None:
        """What the newest plan that has come was decided from, on rank 0; None: nothing was known yet. For the end."""
        with suppress(Empty):
            while True:
                decided = self._decided.get_nowait()
                self.found = self.found if isinstance(decided, BaseException) else decided[1]
        return self.found

    def _run(self) -> None:
        try:
            if not self._plans:
                if (report := self._handed_in.get()) is None:
                    return
                self._exchange(report)
            self._decide_following()
            while (report := self._handed_in.get()) is not None:
                self._exchange(report)
        except BaseException as error:  # raised by the thread that waits
            self._decided.put(error)

    def _exchange(self, report: RankReport) -> None:
        """Send this rank's report, and receive what is decided from those of all."""
        sent = self._mail.bytes_sent
        reports = [decode(RankReport, message) for message in self._mail.gather(encode(report))]
        sketches = sum(share.measure.bytes_sent for share in report.trainers.values())
        # A message is compressed, and small sketches may be larger than all of it.
        self._control_bytes += max(0, self._mail.bytes_sent - sent - sketches)
        self._announce(self._decide(reports) if reports else None)

    def _decide_following(self) -> None:
        """Decide the plan after that with which the run begins, or resumes, whose round nobody has reported yet."""
        decision = None
        if self._rank == 0:
            decision = Decision(plan_round(self._settings, self._inputs, self._plans[-1], self._resumed), self._resumed)
        self._announce(decision)

    def _announce(self, decision: Decision | None) -> None:
        """Send a decision, or receive it, and hand it to the main thread."""
        sent = self._mail.bytes_sent
        plan = decode(RoundPlan, self._mail.broadcast(encode(decision.plan) if decision else None))
        self._control_bytes += self._mail.bytes_sent - sent
        self._plans = [*self._plans[-1:], plan]
        if decision:
            self._record(decision)
        self._decided.put((plan, decision and decision.found))

    def _decide(self, of_ranks: Sequence[RankReport]) -> Decision:
        settings, size = self._settings, self._settings.pool.ranks_per_worker
        reported, last = (self._plans[0], self._plans[-1]) if self._plans else (None, None)
        is_plugin, is_streaming = settings.batching.gradient_norm is GradientNorm.plugin, settings.wire.is_streaming
        of_ranks = with_statistics(of_ranks, is_plugin, is_streaming)
        errors, reports, seconds = disagreements(of_ranks, size), seat_reports(of_ranks, size), of_ranks[0].seconds
        if settings.simulation.is_on and reported:
            reports = simulated(settings.simulation, settings.wire, reported, reports)
            seconds = self._ended_seconds + round_seconds(reports)
        found = pool_report(reports, reported, seconds, seconds - self._ended_seconds, errors)
        self._ended_seconds = seconds
        return Decision(plan_round(settings, self._inputs, last, found), found, reports, reported)


def exchange_positions(control: ControlPlane, report: RankReport, positions: dict[int, Any]) -> dict[int, Any]:
    """Exchange what ranks know of where streams stand; cost is added to the report."""
    replies = _exchanged(control, report, {"positions": positions})
    return {int(stream): position for reply in replies for stream, position in reply["positions"].items()}


def exchange_reports(control: ControlPlane, report: RankReport, own: RankReport) -> list[RankReport]:
    """Every rank's `own` on every rank; cost is added to the report. Collective."""
    return [decode(RankReport, message) for message in _exchanged(control, report, encode(own))]


@record_function("control")
def _exchanged(control: ControlPlane, report: RankReport, message: Message) -> list[Message]:
    """Every rank's message on every rank, while nothing is computed; cost is added to the report. Collective."""
    start, sent = time.perf_counter(), control.bytes_sent
    replies = control.exchange(message)
    report.control_seconds += time.perf_counter() - start
    report.control_bytes_sent += control.bytes_sent - sent
    return replies


def merged_reports(control: ControlPlane, report: RankReport) -> MergeReport:
    """What all ranks have to report of the merges before this round, on rank 0; nothing elsewhere. Collective."""
    messages = control.gather(encode(report.merge))
    return sum((decode(MergeReport, message) for message in messages), MergeReport())
