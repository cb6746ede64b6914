"""Report and plan: every rank tells rank 0 about its round, rank 0 decides the next one for all."""

import time
from collections.abc import Callable, Mapping, Sequence

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.decisions.plan import RoundPlan
from adloco_dist.decisions.report import RankReport


def coordinate(
    control: ControlPlane, report: RankReport, decide: Callable[[Sequence[RankReport]], RoundPlan]
) -> tuple[RoundPlan, Sequence[RankReport], RankReport]:
    """One gather and one broadcast. `decide` runs on rank 0 alone; its plan holds for everybody.

    Returns:
        The plan; all reports on rank 0, none elsewhere; and the rank's next report, begun with the cost of this
        exchange.
    """
    start, sent = time.perf_counter(), control.bytes_sent
    reports = [RankReport.from_message(message) for message in control.gather(report.to_message())]
    plan = RoundPlan.from_message(control.broadcast(decide(reports).to_message() if reports else None))
    spent = time.perf_counter() - start
    return plan, reports, RankReport(report.rank, control_seconds=spent, control_bytes_sent=control.bytes_sent - sent)


def all_complete(
    control: ControlPlane, report: RankReport, complete: bool, places: Mapping[int, Sequence[int]]
) -> tuple[bool, dict[int, Sequence[int]]]:
    """Whether all ranks have come to the end of the inner phase, before anybody enters a collective of the outer step.

    What it costs goes into `report`.

    Args:
        places: of the streams that this rank reads; the answer has those of all ranks.
    """
    start, sent = time.perf_counter(), control.bytes_sent
    replies = control.exchange({"complete": complete, "places": dict(places)} if places else {"complete": complete})
    answer = all(reply["complete"] for reply in replies)
    everywhere = {int(id): place for reply in replies for id, place in reply.get("places", {}).items()}
    report.control_seconds += time.perf_counter() - start
    report.control_bytes_sent += control.bytes_sent - sent
    return answer, everywhere
