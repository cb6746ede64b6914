"""The whole outer step for a 20 MB payload, two ranks.

Between two hosts at 100 Mbit/s (network namespaces, links shaped with tc): against a bare all-reduce of the same
bytes. On loopback: against a plain flat DiLoCo step and against torchft's DiLoCo. All sides are interleaved.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import their_diloco
from adloco_dist.cluster.groups import form_group
from adloco_dist.config import Backend
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from common import interleave, median_ratio, parse, report, spread
from helpers.hosts import hosts, why_unavailable
from helpers.lone import lone_trainer

# 5.0M parameters: 20 MB in fp32.
MODEL = (
    "model.overrides={hidden_size: 256, intermediate_size: 688, num_hidden_layers: 6, num_attention_heads: 4, "
    "num_key_value_heads: 4, tie_word_embeddings: true}"
)
VOCAB_SIZE, LINK_RATE = 1024, "100mbit"
Side = Callable[[], None]


def new_objective() -> LanguageObjective:
    settings = compose([MODEL])
    return LanguageObjective.fitted(settings, Vocabulary(VOCAB_SIZE))


def adloco_side(rank: int) -> tuple[Side, int]:
    """One outer step of a trainer with one worker per rank, with the checksum that every round takes."""
    settings = compose([MODEL, "algorithm=diloco"])
    objective = new_objective()
    module = objective.build(torch.device("cpu"), in_bf16=False)
    table = TokenTable([np.zeros(65, np.uint16)], 64)
    trainer, slot = lone_trainer(settings, objective, module, table, workers=[rank])
    group = form_group((0, 1), Backend.gloo, settings.cluster.timeout_seconds)

    def step() -> None:
        trainer.step(0, group)
        trainer.checksum()

    return step, slot.flat_model.payload.nbytes


def new_model() -> nn.Module:
    return new_objective().build(torch.device("cpu"), in_bf16=False)


def plain_side(model: nn.Module, is_fused: bool = False) -> Side:
    """DiLoCo's outer step as one would write it by hand: one flat all-reduce, torch's SGD with Nesterov momentum."""
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    sizes = [parameter.numel() for parameter in anchor]
    optimizer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True, fused=is_fused)

    def step() -> None:
        delta = torch.cat([(x - w.data).flatten() for x, w in zip(anchor, model.parameters(), strict=True)])
        dist.all_reduce(delta, op=dist.ReduceOp.AVG)
        for x, part in zip(anchor, delta.split(sizes), strict=True):
            x.grad = part.view_as(x)
        optimizer.step()
        for x, w in zip(anchor, model.parameters(), strict=True):
            w.data.copy_(x)

    return step


def torchft_side(cleanup: ExitStack, in_buckets: bool = False) -> Side:
    """torchft's DiLoCo, by default per tensor, synchronising at every step of an inner optimizer that does nothing."""
    model = new_model()
    inner_optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    outer_optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    options = {"sync_every": 1, "use_bucketization": in_buckets}
    store = their_diloco.enter(cleanup, [model], inner_optimizer, [outer_optimizer], **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        assert store.port
        inner_optimizer.step()

    return step


def on_hosts(rank: int, rounds: int) -> dict[str, Any]:
    ours, payload_bytes = adloco_side(rank)
    buffer = torch.zeros(payload_bytes // 4)

    def bare() -> None:
        dist.all_reduce(buffer)

    seconds = interleave([_aligned(ours), _aligned(bare)], rounds, warmup=1)
    return {"names": ["adloco_dist", "bare all-reduce"], "seconds": seconds, "payload_bytes": payload_bytes}


def on_loopback(rank: int, rounds: int) -> dict[str, Any]:
    with ExitStack() as cleanup:
        ours, payload_bytes = adloco_side(rank)
        sides = [ours, plain_side(new_model()), torchft_side(cleanup)]
        seconds = interleave([_aligned(side) for side in sides], rounds, warmup=3)
    names = ["adloco_dist", "plain flat DiLoCo", "torchft DiLoCo"]
    return {"names": names, "seconds": seconds, "payload_bytes": payload_bytes}


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{options.store}", rank=options.rank, world_size=2)
    compare = on_loopback if options.where == "loopback" else on_hosts
    try:
        result = compare(options.rank, options.rounds)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # torchft's threads would keep the process
    if options.rank == 0:
        print("RESULT " + json.dumps(result))
    dist.barrier()


def _aligned(side: Side) -> Side:
    """Both ranks begin together, so that a side pays for its own work alone. The barrier counts for all sides."""

    def step() -> None:
        dist.barrier()
        side()

    return step


def _command(rank: int, store: str, rounds: int, where: str) -> list[str]:
    arguments = ["--rank", str(rank), "--store", store, "--rounds", str(rounds), "--where", where]
    return [sys.executable, __file__, *arguments]


def _result(start: Callable[[int, IO[str]], "subprocess.Popen[str]"]) -> dict[str, Any]:
    """What rank 0 found. Output goes to files: a full pipe would stop a rank in the middle of a measurement."""
    with ExitStack() as cleanup:
        files = [cleanup.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        processes = [start(rank, file) for rank, file in enumerate(files)]
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(0.1)
        for process in processes:
            process.kill()
            process.wait()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit("error: a rank failed:\n" + "\n".join(outputs))
    return json.loads(lines[0].removeprefix("RESULT "))


def compare_on_hosts(rounds: int) -> dict[str, Any]:
    with hosts(2, rate=LINK_RATE) as nodes:
        store = f"{nodes[0].address}:29400"
        return _result(lambda rank, file: nodes[rank].start(_command(rank, store, rounds, "hosts"), output=file))


def compare_on_loopback(rounds: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{probe.getsockname()[1]}"

    def start(rank: int, file: IO[str]) -> "subprocess.Popen[str]":
        command = _command(rank, store, rounds, "loopback")
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True)

    return _result(start)


def main() -> None:
    parser = parse(__doc__ or "")
    for name, kind in (("--rank", int), ("--store", str), ("--rounds", int), ("--where", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    rows, figures = [], {}
    local = compare_on_loopback(20 if options.quick else 40)
    ours, plain, torchft = local["seconds"]
    figures["outer_step_over_plain"] = median_ratio(ours, plain)
    figures["outer_step_over_torchft"] = median_ratio(ours, torchft)
    rows += [[f"loopback: {name}", *spread(s, 1e-3)] for name, s in zip(local["names"], local["seconds"], strict=True)]
    reason = why_unavailable()
    if reason is None:
        remote = compare_on_hosts(4 if options.quick else 20)
        ours, bare = remote["seconds"]
        figures["outer_step_over_bare_allreduce"] = median_ratio(ours, bare)
        rows += [
            [f"{LINK_RATE}: {name}", *spread(s, 1e-3)]
            for name, s in zip(remote["names"], remote["seconds"], strict=True)
        ]
    else:
        print(f"the comparison between hosts is left out: {reason}", file=sys.stderr)
    title = f"outer step, {local['payload_bytes'] / 1e6:.1f} MB, 2 ranks: milliseconds"
    report(title, ["", "min", "median", "max"], rows, figures, options.json)


if __name__ == "__main__":
    main()
