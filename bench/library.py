"""An own loop with `DiLoCo`, against the same loop by hand and against torchft's DiLoCo: 5.0M parameters, two ranks.

inner: updates that end no round, with the library and by hand. outer: what ends a round, all sides interleaved. memory:
peak resident memory of ranks that take outer steps, with the library and by hand. import: every name of the library
against `import torch`, in fresh interpreters. Torch makes so many objects that a full garbage collection is due soon
after its import, whoever makes the next ones; the time of such collections is shown beside the whole.

By hand is what outer_step.py calls plain: one flat all-reduce of the differences, and torch's SGD as it is by default;
fused, too. torchft sends all parameters in one bucket, which is faster than its default, one all-reduce for each.
"""

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from adloco_dist import DiLoCo
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.losses import losses
from common import interleave, median_ratio, parse, report, spread, together
from helpers.processes import run_ranks
from outer_step import VOCAB_SIZE, Side, new_model, plain_side, torchft_side

NUM_SEQUENCES, NUM_TOKENS = 2, 128
"""Of each rank and update."""
UPDATES = 4
"""Of one turn of a side."""
NO_ROUND_ENDS = 10**9
Rows = list[list[str]]


# --- inner and outer


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """The loop of somebody who has a model and an optimizer."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(UPDATES):
        batch = TokenBatch.packed(torch.randint(VOCAB_SIZE, (NUM_SEQUENCES, NUM_TOKENS + 1), generator=generator))
        losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def library_side(model: nn.Module, cleanup: ExitStack) -> tuple[Side, torch.optim.Optimizer]:
    """The outer step, and an optimizer that counts its updates."""
    optimizer = new_optimizer(model)
    diloco = cleanup.enter_context(DiLoCo(model, optimizer, updates_per_round=NO_ROUND_ENDS))
    return lambda: diloco.outer_step() and None, optimizer


def seconds_on_ranks(runtime: Runtime, inner_pairs: int, outer_turns: int) -> Any:
    """Of inner turns, and of outer steps: a list for each side."""
    _silence()
    with ExitStack() as cleanup:
        model, by_hand = new_model(), new_model()
        library, optimizer = library_side(model, cleanup)
        loops: list[Side] = [
            lambda: train(model, optimizer, runtime.rank),
            lambda: train(by_hand, own_optimizer, runtime.rank),
        ]
        own_optimizer = new_optimizer(by_hand)
        inner = interleave([together(loop) for loop in loops], inner_pairs)
        sides = [
            library,
            plain_side(by_hand),
            plain_side(new_model(), is_fused=True),
            torchft_side(cleanup, in_buckets=True),
        ]
        outer = interleave([together(side) for side in sides], outer_turns, warmup=3)
    return inner, outer


def _silence() -> None:
    """torchft's servers write several lines a step."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def speed(quick: bool) -> tuple[Rows, dict[str, float]]:
    seconds: list[list[list[float]]] = [[[], []], [[], [], [], []]]
    for _ in range(1 if quick else 4):
        found = run_ranks(seconds_on_ranks, [0, 0], 6 if quick else 10, 20)[0]
        for parts, new in zip(seconds, found, strict=True):
            for side, more in zip(parts, new, strict=True):
                side += more
    (ours, hand), (library, plain, fused, torchft) = seconds
    processed = UPDATES * NUM_SEQUENCES * NUM_TOKENS
    rows = [
        [f"inner: {name}, tokens/s", *spread([processed / second for second in side])]
        for name, side in (("DiLoCo", ours), ("by hand", hand))
    ]
    names = ["DiLoCo", "by hand", "by hand, fused SGD", "torchft, one bucket"]
    rows += [[f"outer: {name}, ms", *spread(side, 1e-3)] for name, side in zip(names, seconds[1], strict=True)]
    return rows, {
        "library_inner_ratio": median_ratio(hand, ours),
        "library_outer_over_hand": median_ratio(library, plain),
        "library_outer_over_hand_fused": median_ratio(library, fused),
        "library_outer_over_torchft": median_ratio(library, torchft),
    }


# --- memory


def peak_bytes(runtime: Runtime, side: str) -> int:
    """Of this process, which takes outer steps and no updates: an update's gradients would hide what those take."""
    with ExitStack() as cleanup:
        model = new_model()
        step = plain_side(model) if side == "by hand" else library_side(model, cleanup)[0]
        for _ in range(3):
            step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(quick: bool) -> tuple[Rows, dict[str, float]]:
    peaks: dict[str, list[float]] = {"DiLoCo": [], "by hand": []}
    num_bytes = sum(parameter.nbytes for parameter in new_model().parameters())
    for _ in range(2 if quick else 5):
        for side, found in peaks.items():
            found += run_ranks(peak_bytes, [0, 0], side)
    vectors = [(ours - hand) / num_bytes for ours, hand in zip(*peaks.values(), strict=True)]
    rows = [[f"memory: {side}, peak MB", *spread(found, 1e6)] for side, found in peaks.items()]
    rows.append([f"memory: difference, vectors of {num_bytes / 1e6:.1f} MB", *spread(vectors)])
    return rows, {"library_memory_vectors": statistics.median(vectors)}


# --- import

STATEMENT = """
import gc, time
collecting = 0.0

def watch(phase, info):
    global collecting
    if info["generation"] == 2:
        collecting += time.perf_counter() * (1 if phase == "stop" else -1)

gc.callbacks.append(watch)
start = time.perf_counter()
{statement}
print(time.perf_counter() - start, collecting)
"""


def seconds_of(statement: str) -> tuple[float, float]:
    """Of a statement in a fresh interpreter, without its start; and those of full garbage collections in that time."""
    program = STATEMENT.format(statement=statement)
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    whole, collecting = map(float, output.split())
    return whole, collecting


def imports(quick: bool) -> tuple[Rows, dict[str, float]]:
    seconds: dict[str, list[tuple[float, float]]] = {"from adloco_dist import *": [], "import torch": []}
    for number in range(1 + (4 if quick else 15)):
        for statement in sorted(seconds, reverse=bool(number % 2)):
            found = seconds_of(statement)
            if number:  # at first files come from the disk
                seconds[statement].append(found)
    rows: Rows = []
    whole: list[list[float]] = []
    without: list[list[float]] = []
    for statement, found in seconds.items():
        whole.append([all_of_it for all_of_it, _ in found])
        without.append([all_of_it - collecting for all_of_it, collecting in found])
        rows.append([f"import: {statement}, ms", *spread(whole[-1], 1e-3)])
        rows.append(
            ["    of that full garbage collections, ms", *spread([collecting for _, collecting in found], 1e-3)]
        )
    return rows, {
        "import_over_torch": median_ratio(*whole),
        "import_over_torch_without_collections": median_ratio(*without),
    }


PARTS: dict[str, Callable[[bool], tuple[Rows, dict[str, float]]]] = {
    "speed": speed,
    "memory": memory,
    "import": imports,
}


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=PARTS, help="one of the three parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: Rows = []
    figures: dict[str, float] = {}
    for name, part in PARTS.items():
        if options.only in (None, name):
            found_rows, found = part(options.quick)
            rows += found_rows
            figures |= found
    tokens = f"{NUM_SEQUENCES} x {NUM_TOKENS} tokens per update and rank"
    report(f"a loop of one's own, 2 ranks, {tokens}", ["", "min", "median", "max"], rows, figures, options.json)


if __name__ == "__main__":
    main()
