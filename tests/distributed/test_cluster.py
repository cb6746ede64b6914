"""The control plane and process groups on real ranks."""

import ctypes
import os
import random
import re
import threading
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore

from adloco_dist.averaging.checks import RanksDisagreeError
from adloco_dist.averaging.group import Group, GroupError
from adloco_dist.cluster import groups
from adloco_dist.cluster.control import encode
from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.heartbeat import Heartbeat
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Backend, SettingsError
from adloco_dist.pool.trainer import Trainer
from adloco_dist.setup.agreement import compare_settings
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, small_settings, train_small_pool


def talk(runtime: Runtime) -> dict[str, Any]:
    control, rank = runtime.control, runtime.rank
    message = {"rank": rank, "text": "".join(chr(random.randrange(32, 1000)) for _ in range(10 ** (rank + 1)))}
    before = control.bytes_sent
    gathered = control.gather(message)
    sent = control.bytes_sent - before
    return {
        "gathered": [(m["rank"], len(m["text"])) for m in gathered],
        "broadcast": control.broadcast({"plan": [1.5, None, "x"]} if rank == 0 else None),
        "all": [m["rank"] for m in control.exchange({"rank": rank})],
        "sent": sent,
        "bytes": 8 + len(encode(message)),
    }


def test_messages_of_any_length_arrive() -> None:
    first, second, third = run_ranks(talk, [0, 0, 1])
    assert first["gathered"] == [(0, 10), (1, 100), (2, 1000)]
    assert second["gathered"] == third["gathered"] == []
    for rank in (first, second, third):
        assert rank["broadcast"] == {"plan": [1.5, None, "x"]}
        assert rank["all"] == [0, 1, 2]
    assert [rank["sent"] for rank in (first, second, third)] == [0, second["bytes"], third["bytes"]]
    assert third["bytes"] > 1000 > second["bytes"]


def agree(runtime: Runtime, failing: list[int]) -> str:
    error = SettingsError("x=1: no") if runtime.rank in failing else None
    try:
        runtime.control.agree(error)
    except SettingsError as raised:
        return str(raised)
    return "agreed"


@pytest.mark.parametrize(("failing", "detail"), [([], "agreed"), ([0, 1, 2], "x=1: no"), ([2], "x=1: no (on rank 2)")])
def test_all_ranks_raise_what_one_finds(failing: list[int], detail: str) -> None:
    assert run_ranks(agree, [0, 0, 0], failing) == [detail] * 3


def compare(runtime: Runtime) -> str:
    try:
        compare_settings(runtime.control, small_settings("inner.lr=0.5" if runtime.rank == 1 else "inner.lr=0.25"))
    except SettingsError as raised:
        return str(raised)
    return "equal"


def test_settings_that_differ_are_named_with_their_ranks() -> None:
    for detail in run_ranks(compare, [0, 1, 1]):
        assert "inner.lr differs between ranks: 0.25 on ranks {0,2}, 0.5 on rank 1" in detail


def sums(runtime: Runtime) -> list[float]:
    """Overlapping groups, formed twice, used in ascending order."""
    formed = Groups(Backend.gloo, timeout_seconds=60)
    sets = [(0, 1), (1, 2, 3), (0, 1, 2, 3), (2,)]
    results = []
    for ranks in sets:
        value = torch.tensor([float(runtime.rank)])
        group = formed.of(ranks)
        if runtime.rank in ranks and group is not None:
            group.all_reduce(value)
        results.append(value.item())
    return results


def test_groups_of_any_rank_set() -> None:
    assert run_ranks(sums, [0, 0, 1, 1]) == [[1, 0, 6, 0], [1, 6, 6, 1], [2, 6, 6, 2], [3, 6, 6, 3]]


def form_again(runtime: Runtime) -> list[int]:
    """Keys in the ranks' store after groups have come and gone, more and more often."""
    formed, found = Groups(Backend.gloo, timeout_seconds=60), []
    for _ in range(3):
        for ranks in ((0, 1), (0, 1, 2)):
            group = formed.of(ranks)
            if group is not None:
                group.all_reduce(torch.ones(1))
        formed.keep([])
        runtime.control.exchange({})
        found.append(sum(not key.startswith("beat/") for key in runtime.store.list_keys()))
        runtime.control.exchange({})
    return found


def test_groups_that_have_ended_leave_nothing_in_the_store() -> None:
    for found in run_ranks(form_again, [0, 0, 0]):
        assert found == found[:1] * 3


def stay_away(runtime: Runtime) -> None:
    """Rank 1 is alive, and never comes to the second all-reduce."""
    group = Groups(Backend.gloo, timeout_seconds=1).of((0, 1))
    assert group is not None
    value = torch.ones(1)
    group.all_reduce(value)
    if runtime.rank == 1:
        threading.Event().wait()
    runtime.heartbeat.enter("the second all-reduce")
    assert threading.current_thread() is threading.main_thread()
    group.all_reduce(value)


def test_a_collective_that_a_rank_does_not_come_to_raises_and_names_it() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(stay_away, [0, 0])
    detail = str(raised.value)
    assert "rank 0:" in detail
    assert "group.all_reduce(value)" in detail, "where the main thread stood"
    assert re.search(r"RuntimeError: .*[tT]imed out", detail)
    assert f"waiting for rank 1 on {os.uname().nodename} (start)" in detail


def move(runtime: Runtime) -> dict[str, Any]:
    """Tensors of different lengths between ranks 1 and 2 of three: to each other, several in order, and one way."""
    group = Groups(Backend.gloo, timeout_seconds=60).of((1, 2))
    if group is None:
        return {}
    rank = runtime.rank
    parts = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
    other, place = (2, 0) if rank == 1 else (1, 1)
    group.send_and_receive([(other, parts[place])], [(other, parts[1 - place])])
    received = torch.zeros(3)
    # Rank 1 sends two that travel by themselves, rank 2 sends one.
    sent = [(2, torch.tensor([11.0])), (2, torch.tensor([12.0]))] if rank == 1 else [(1, torch.tensor([20.0]))]
    group.send_and_receive(sent, [(other, part) for part in received[: 3 - len(sent)].split(1)])
    gathered = [torch.tensor([1.0]), torch.zeros(1)] if rank == 1 else []
    group.send_and_receive([(1, torch.tensor([2.0]))] if rank == 2 else [], [(2, row) for row in gathered[1:]])
    return {
        "exchanged": [part.tolist() for part in parts],
        "received": received.tolist(),
        "gathered": [row.tolist() for row in gathered],
    }


def test_what_groups_exchange() -> None:
    outside, first, second = run_ranks(move, [0, 0, 0])
    assert outside == {}
    assert first == {"exchanged": [[1, 1], [2, 2, 2]], "received": [20, 0, 0], "gathered": [[1], [2]]}
    assert second == {"exchanged": [[1, 1], [2, 2, 2]], "received": [11, 12, 0], "gathered": []}


def hold_the_interpreter(runtime: Runtime) -> int:
    """As CUDA may at its start, on all ranks at once, for longer than silence and heartbeat together."""
    beats = Heartbeat(
        PrefixStore("fast", runtime.store), runtime.rank, runtime.world_size, 0.1, 0.4, StopRequest()
    )  # fmt: skip
    for place in ("before", "after"):
        beats.enter(place)
        while beats.behind():  # until the others' beats tell that they are there too
            pass
        runtime.control.exchange({})
        if place == "before":
            ctypes.PyDLL(None).usleep(1_500_000)
    beats.close()
    return runtime.rank


def test_a_rank_outlives_a_call_that_holds_its_interpreter() -> None:
    assert run_ranks(hold_the_interpreter, [0, 0]) == [0, 1]


def fail_to_connect(runtime: Runtime) -> str:
    """Rank 0 hears nothing of rank 1, which has given up."""

    def give_up(self: Group) -> None:
        raise GroupError("rank 1 has given up")

    groups.CONNECT_SECONDS = 1.0
    if runtime.rank == 1:
        Group.connect = give_up
    try:
        train_small_pool(runtime, *FOUR_TRAINERS, "pool.trainers=2", "pool.workers_per_trainer=2")
    except SettingsError as raised:
        return str(raised)
    return "went on"


def test_ranks_that_cannot_exchange_tensors_are_named_before_training() -> None:
    for detail in run_ranks(fail_to_connect, [0, 0]):
        assert re.match(
            r"cluster\.backend=gloo: ranks \{0,1\} cannot exchange tensors \(.*timed out.*\); ", detail, re.I
        )
        assert "\n" not in detail


def train_with_a_torn_anchor(runtime: Runtime) -> str:
    if runtime.rank == 1:
        exact = Trainer.checksum
        Trainer.checksum = lambda self: [exact(self)[0], 0]  # this rank's memory, say, lost a bit
    try:
        train_small_pool(runtime, *FOUR_TRAINERS, "pool.trainers=2", "pool.workers_per_trainer=2")
    except RanksDisagreeError as raised:
        return str(raised)
    return "went on"


def test_ranks_that_disagree_about_an_anchor_stop_the_run() -> None:
    for detail in run_ranks(train_with_a_torn_anchor, [0, 0]):
        assert "the anchor of trainer 0 differs between rank 0 and rank 1" in detail


def poisoned(runtime: Runtime) -> dict[str, Any]:
    """A trainer whose data are fine but whose rate is absurd loses its workers, and the others do not notice."""
    return train_small_pool(
        runtime, *FOUR_TRAINERS, "inner=sgd", "inner.lr=1e300", "inner.clip_norm=null", "budget=2rounds",
        "pool.workers_per_trainer=2", "pool.trainers=1", "inner.schedule=constant",
    )  # fmt: skip


def test_a_run_without_finite_workers_ends_with_the_anchor_it_began_with() -> None:
    first, second = run_ranks(poisoned, [0, 0])
    assert [record.get("finite_workers") for record in first["records"]] == [None, 0, 0]
    assert (first["anchors"][0] == second["anchors"][0]).all()
    losses = [record["validation_loss"] for record in first["records"] if "validation_loss" in record]
    assert losses[0] == losses[-1]
