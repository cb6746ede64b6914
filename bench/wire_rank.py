"""A rank of bench/wire.py on one of two hosts: what averages between them take; rank 0 prints it as JSON."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)

from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.background import Background
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.group import Group, group_of
from adloco_dist.averaging.inside_first import InsideFirst
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.schedule import Action, round_events
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.objective.language import LanguageObjective

AVERAGERS: dict[str, Averager] = {
    "fp32": FullPrecision(),
    "bf16": Quantized(BFloat16()),
    "int8": Quantized(WholeNumbers(8)),
    "int4": Quantized(WholeNumbers(4)),
    "sparse": Sparse(),
}
CPU = torch.device("cpu")


def averages(group: Group, num_elements: int, repetitions: int) -> dict[str, Any]:
    """Seconds and bytes of every format, in turn."""
    return _in_turn(AVERAGERS, torch.randn(num_elements + 1) * 1e-3, group, repetitions)


def _in_turn(
    averagers: Mapping[str, Averager], payload: torch.Tensor, group: Group, repetitions: int
) -> dict[str, Any]:  # fmt: skip
    residual = torch.zeros(len(payload) - 1)
    found: dict[str, Any] = {name: [] for name in averagers}
    for number in range(repetitions + 1):
        for name, averager in averagers.items():
            dist.barrier()
            before, start = _bytes_sent(), time.perf_counter()
            averager.exchange(payload, 1, group, residual if averager.keeps_residual else None)()
            seconds = time.perf_counter() - start
            dist.barrier()
            if number:
                found[name].append({"seconds": seconds, "bytes": _bytes_sent() - before})
    return found


def nodes(group: Group, num_elements: int, repetitions: int) -> dict[str, Any]:
    """Seconds and bytes of int4 among all ranks, and inside of hosts first, in turn; half of the ranks on each."""
    payload = torch.randn(num_elements + 1) * 1e-3
    flat = Quantized(WholeNumbers(4))
    halves = tuple(2 * rank // len(group.ranks) for rank in group.ranks)
    return _in_turn({"flat": flat, "inside_first": InsideFirst(flat, halves)}, payload, group, repetitions)


def scheduled(group: Group, num_elements: int, repetitions: int) -> dict[str, Any]:
    """Seconds of the updates of a round of `small`, without averages and with those of wire=slow_link, in turn.

    Time in which a rank waits for an average is not counted: it is what exposed_* measures.
    """
    update, events = _new_update(), round_events(25, fragments=4, delay_updates=5)
    payload = torch.randn(num_elements // 4 + 1) * 1e-3
    mixes = {event.update for event in events if event.action is Action.mix}
    starts = {event.update for event in events if event.action is Action.start} | {1}  # the first of the round before

    def take_round(averages: bool) -> float:
        dist.barrier()
        seconds, under_way = 0.0, None
        for number in range(1, events[-1].update + 1):
            seconds += _seconds(update)
            if averages and under_way and number in mixes:
                under_way.wait()()
                under_way = None
            if averages and number in starts:
                call = partial(AVERAGERS["int4"].exchange, payload, 1, group, None)
                under_way = Background(call, CPU).begin()
        return seconds

    take_round(averages=True)
    found: dict[str, Any] = {"alone": [], "beside": []}
    for _ in range(repetitions):
        found["alone"].append(take_round(averages=False))
        found["beside"].append(take_round(averages=True))
    return found


def overlap(group: Group, num_elements: int, repetitions: int) -> dict[str, Any]:
    """Seconds of five updates of `small`, alone and with averages under way, in turn."""
    update = _new_update()
    payload = torch.randn(num_elements + 1) * 1e-3

    def updates() -> None:
        for _ in range(5):
            update()

    def beside() -> None:
        # As many as take longer than the updates; what is left of them is not counted.
        def average() -> torch.Tensor:
            for _ in range(count):
                AVERAGERS["int4"].exchange(payload, 1, group, None)()
            return payload

        under_way.append(Background(average, CPU).begin())
        updates()

    under_way: list[Background] = []
    alone = [_seconds(updates) for _ in range(2)][1]
    one = statistics.median(_seconds(lambda: AVERAGERS["int4"].exchange(payload, 1, group, None)()) for _ in range(3))
    counts = torch.tensor([round(1.5 * alone / one) + 1])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    count = int(counts)
    found: dict[str, Any] = {"alone": [], "beside": []}
    for _ in range(repetitions):
        dist.barrier()
        found["alone"].append(_seconds(updates))
        dist.barrier()
        found["beside"].append(_seconds(beside))
        under_way.pop().wait()
    return found


def _new_update() -> Callable[[], None]:
    """An update of `small` on 4 sequences of 128 tokens."""
    settings = compose(["model=small", "data.sequence_length=128"])
    module = LanguageObjective.fitted(settings, Vocabulary(4096)).build(CPU, in_bf16=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tokens = torch.randint(4096, (4, 128))

    def update() -> None:
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _bytes_sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main() -> None:
    rank, num_ranks, master, part, num_elements, repetitions = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    torch.manual_seed(int(rank))
    store = TCPStore(master, 29512, int(num_ranks), rank == "0", timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(num_ranks))
    group = group_of(None, CPU, 600)
    assert group is not None
    parts = {"averages": averages, "nodes": nodes, "overlap": overlap, "scheduled": scheduled}
    found = parts[part](group, int(num_elements), int(repetitions))
    if rank == "0":
        print(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
