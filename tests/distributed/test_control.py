"""What ranks agree on beside their collectives: where all of them stop, and messages that nobody waits for."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from torch.distributed.distributed_c10d import PrefixStore

from adloco_dist.cluster.heartbeat import Heartbeat
from adloco_dist.cluster.mail import Mail
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.plan import INTERRUPTED, RoundPlan
from adloco_dist.policy.report import RankReport
from adloco_dist.round.coordinate import Coordinator
from helpers.clocks import without_clocks
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS, SIMULATED_CLOCK, held_anchors, train_small_pool

EVENTS = [(round_, event) for round_ in range(4) for event in range(3)]


def stop_at(runtime: Runtime, ahead: int, heard: int) -> dict[str, Any]:
    """Rank 1 is so many events ahead of rank 0 when that hears of a request, and waits where only rank 0 could help."""
    stop = StopRequest()
    beats = Heartbeat(PrefixStore("own", runtime.store), runtime.rank, runtime.world_size, 0.1, 10.0, stop)
    begun = []
    for place, event in enumerate(EVENTS):
        if runtime.rank == 0 and place == heard:
            runtime.control.exchange({})  # rank 1 has come as far as it can
            stop.is_heard = True
        if runtime.rank == 1 and place == heard + ahead:
            runtime.control.exchange({})
            while stop.held_at is None:  # in a collective, with its heartbeat alone
                pass
        if not stop.begins(event):
            break
        begun.append(event)
    runtime.control.exchange({})
    beats.close()
    return {"begun": begun, "last": stop.last}


@pytest.mark.parametrize(("ahead", "heard"), [(0, 4), (1, 0), (2, 5)])
def test_all_ranks_end_after_the_last_event_that_any_has_begun(ahead: int, heard: int) -> None:
    first, second = run_ranks(stop_at, [0, 0], ahead, heard)
    assert first == second
    assert first["begun"] == EVENTS[: heard + ahead]
    assert first["last"] == (EVENTS[heard + ahead - 1] if heard + ahead else (-1, 0))


def exchange(runtime: Runtime, rounds: int) -> dict[str, Any]:
    """Every rank's thread passes its messages on, all of which were handed in at once."""
    mail, queue, received = runtime.mail, SimpleQueue[dict[str, Any]](), []

    def run() -> None:
        for _ in range(rounds):
            reports = mail.gather(queue.get())
            received.append(mail.broadcast({"all": reports} if reports else None))

    thread = threading.Thread(target=run)
    thread.start()
    for number in range(rounds):
        queue.put({"rank": runtime.rank, "number": number, "text": "ä" * number})
    thread.join()
    runtime.control.exchange({})
    keys = [f"report/{number}/{rank}" for number in range(rounds) for rank in (1, 2)]
    kept = [key for key in keys if runtime.store.check([key])]
    plans = [number for number in range(rounds) if runtime.store.check([f"plan/{number}"])]
    return {"received": received, "kept": kept, "plans": plans, "bytes": mail.bytes_sent}


def train_late(runtime: Runtime, late_rank: int | None) -> dict[str, Any]:
    """A rank's reports leave when it waits for the very plan that follows from them, and no sooner."""
    if runtime.rank == late_rank:
        wanted, needed, gather, following = threading.Semaphore(0), iter([1, 2]), Mail.gather, Coordinator.following

        def late(self: Mail, message: Any) -> Any:
            for _ in range(next(needed, 1)):
                wanted.acquire()
            return gather(self, message)

        def wait_for(self: Coordinator, report: RankReport) -> RoundPlan:
            wanted.release()
            return following(self, report)

        Mail.gather, Coordinator.following = late, wait_for  # pyright: ignore[reportAttributeAccessIssue]
    return train_small_pool(runtime, *FOUR_TRAINERS, *SIMULATED_CLOCK, *MERGING)


def stop_before_a_plan_is_received(runtime: Runtime, folder: str, looks: int | None) -> dict[str, Any]:
    """Rank 1 receives plans when it waits for them or ends, and no sooner: where it stops, one has been sent to it."""
    if runtime.rank == 1:
        wanted, broadcast = threading.Semaphore(0), Mail.broadcast
        following, leave = Coordinator.following, Coordinator.__exit__

        def late(self: Mail, message: Any) -> Any:
            wanted.acquire()
            return broadcast(self, message)

        def wait_for(self: Coordinator, report: RankReport) -> RoundPlan:
            wanted.release()
            return following(self, report)

        def end(self: Coordinator, kind: Any, error: Any, trace: Any) -> None:
            wanted.release(100)
            leave(self, kind, error, trace)

        Mail.broadcast, Coordinator.following = late, wait_for  # pyright: ignore[reportAttributeAccessIssue]
        Coordinator.__exit__ = end
    return train_kept(runtime, folder, looks, *FOUR_TRAINERS, *SIMULATED_CLOCK, *MERGING)


def stand_still(runtime: Runtime, still_rank: int | None) -> dict[str, Any]:
    """A rank stands still as its machine may, while the others could take all of their rounds."""
    if runtime.rank == still_rank:
        stops, following = iter([False, False, True]), Coordinator.following

        def stopping(self: Coordinator, report: RankReport) -> RoundPlan:
            if next(stops, False):
                state = f"/proc/{os.getpid()}/stat"
                wake = f"until grep -q ') T ' {state}; do :; done; sleep 2; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            return following(self, report)

        Coordinator.following = stopping  # pyright: ignore[reportAttributeAccessIssue]
    return train_small_pool(runtime, *FOUR_TRAINERS, *SIMULATED_CLOCK, *MERGING)


MERGING = (
    "pool.trainers=2", "pool.workers_per_trainer=2", "merge=worst_with_worst", "merge.every_rounds=3", "budget=8rounds",
    "batching.request=norm_test",
)  # fmt: skip


def test_a_rank_whose_reports_are_late_changes_nothing() -> None:
    whole = run_ranks(train_late, [0, 0], None)
    assert any(row.get("merge") for row in whole[0]["records"])
    for late_rank in (0, 1):
        ranks = run_ranks(train_late, [0, 0], late_rank)
        assert without_clocks(ranks[0]["records"]) == without_clocks(whole[0]["records"])
        for trainer, anchor in held_anchors(ranks).items():
            np.testing.assert_array_equal(anchor, held_anchors(whole)[trainer])


@pytest.mark.parametrize("still_rank", [0, 1])
def test_a_rank_that_stands_still_for_many_rounds_changes_nothing(still_rank: int) -> None:
    whole, ranks = run_ranks(stand_still, [0, 0], None), run_ranks(stand_still, [0, 0], still_rank)
    assert without_clocks(ranks[0]["records"]) == without_clocks(whole[0]["records"])
    for trainer, anchor in held_anchors(ranks).items():
        np.testing.assert_array_equal(anchor, held_anchors(whole)[trainer])


@pytest.mark.parametrize("looks", [5, 14, 23])
def test_stopped_where_a_plan_was_sent_and_not_received_it_is_the_same_run(tmp_path: Path, looks: int) -> None:
    whole = run_ranks(stop_before_a_plan_is_received, [0, 0], str(tmp_path / "whole"), None)
    stopped = run_ranks(stop_before_a_plan_is_received, [0, 0], str(tmp_path / "stopped"), looks)
    assert stopped[0]["stop"] == INTERRUPTED
    resumed = run_ranks(stop_before_a_plan_is_received, [0, 0], str(tmp_path / "stopped"), None)
    for trainer, anchor in held_anchors(resumed).items():
        np.testing.assert_array_equal(anchor, held_anchors(whole)[trainer])
    records = [*stopped[0]["records"], *resumed[0]["records"]]
    assert without_clocks(records) == without_clocks(whole[0]["records"]), "no round twice, none left out"


def test_messages_come_whole_in_their_order_and_leave_nothing_behind() -> None:
    found = run_ranks(exchange, [0, 0, 0], 5)
    expected = [
        {"all": [{"rank": rank, "number": number, "text": "ä" * number} for rank in range(3)]} for number in range(5)
    ]
    assert [rank["received"] for rank in found] == [expected] * 3
    assert found[0]["kept"] == []
    assert found[0]["plans"] == [3, 4], "what somebody may still be reading"
    assert all(rank["bytes"] > 0 for rank in found)
