"""One of the two ranks of bench/wire.py's part `peers`: rounds of our DiLoCo, torchft's and DistributedDataParallel.

Rank 0 prints the seconds of each side's rounds as JSON. A block of a side is three rounds of 25 updates, of which the
first is not counted: what it leaves under way is hidden in the next. DistributedDataParallel averages at every update;
two of them stand for 25.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)
from torch.nn.parallel import DistributedDataParallel

import their_diloco
from adloco_dist import DiLoCo, OuterSGD, Wire
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.objective.language import LanguageObjective

UPDATES, ROUNDS, DDP_UPDATES = 25, 3, 2
FRAGMENTS, DELAY = 5, 4
"""Of torchft's streaming DiLoCo, which wants updates that are a multiple of the fragments."""
PLAIN = Wire()
TakeUpdates = Callable[[int], None]


def new_module() -> nn.Module:
    settings = compose(["model=small", "data.sequence_length=128"])
    return LanguageObjective.fitted(settings, Vocabulary(4096)).build(torch.device("cpu"), in_bf16=False)


def updates_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> TakeUpdates:
    tokens = torch.randint(4096, (4, 128))

    def take(count: int) -> None:
        for _ in range(count):
            module(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return take


def alone(cleanup: ExitStack) -> TakeUpdates:
    module = new_module()
    return updates_of(module, torch.optim.AdamW(module.parameters(), fused=True))


def ours(cleanup: ExitStack, wire: Wire = PLAIN) -> TakeUpdates:
    module = new_module()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    cleanup.enter_context(DiLoCo(module, optimizer, UPDATES, OuterSGD(), wire=wire))
    return updates_of(module, optimizer)


def ours_slow_link(cleanup: ExitStack) -> TakeUpdates:
    return ours(cleanup, Wire(Quantized(WholeNumbers(4)), fragments=4, delay_updates=5))


def ddp(cleanup: ExitStack) -> TakeUpdates:
    module = DistributedDataParallel(new_module())
    return updates_of(module, torch.optim.AdamW(module.parameters(), fused=True))


def torchft(cleanup: ExitStack, is_streaming: bool = False) -> TakeUpdates:
    module = new_module()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    fragments = their_diloco.dealt(module, FRAGMENTS) if is_streaming else [module]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
    store = their_diloco.enter(
        cleanup, fragments, optimizer, outer, sys.argv[2], sys.argv[3], sync_every=UPDATES, use_bucketization=True,
        fragment_sync_delay=DELAY if is_streaming else 0,
    )  # fmt: skip
    take = updates_of(module, optimizer)

    def take_with_store(count: int) -> None:
        assert store.port  # it lives as long as the side
        take(count)

    return take_with_store


def torchft_streaming(cleanup: ExitStack) -> TakeUpdates:
    return torchft(cleanup, is_streaming=True)


SIDES = {
    "alone": alone, "ours_fp32": ours, "ours_slow_link": ours_slow_link, "torchft": torchft,
    "torchft_streaming": torchft_streaming, "ddp": ddp,
}  # fmt: skip


def block(name: str) -> list[float]:
    """The seconds of a side's rounds but the first; of a copy of its own, so that nothing is under way before."""
    with ExitStack() as cleanup:
        take, seconds = SIDES[name](cleanup), []
        count = DDP_UPDATES if name == "ddp" else UPDATES
        dist.barrier()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            take(count)
            seconds.append((time.perf_counter() - start) * UPDATES / count)
    return seconds[1:]


def main() -> None:
    rank, _, master, repetitions = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    store = TCPStore(master, 29514, 2, rank == "0", timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(int(repetitions)):
        for name in SIDES:
            found[name] += block(name)
    if rank == "0":
        print("\n" + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # torchft's threads would keep the process


if __name__ == "__main__":
    main()
