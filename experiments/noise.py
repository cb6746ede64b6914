"""How far requests are from correct ones (request_error): python experiments/noise.py.

The truth is taken from the gradients of 256 single training sequences at the anchor, at 25 points of a run.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from cases import MEASURED, NANO, NANO_SHARE, SEEDS, link
from followed import PATIENT, TIMEOUT_SECONDS, train_followed

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.messages import Json
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.requests import norm_test
from adloco_dist.pool.local_pool import LocalPool
from helpers.gradients import per_sequence_gradients
from helpers.processes import run_ranks

SEQUENCES = 256
POINTS = 25
COMMON = (*MEASURED, *NANO, *link("10", NANO_SHARE), "pool.workers_per_trainer=2")
VARIANTS = {
    "as by default": (),
    "every 10 updates": ("batching.every_updates=10",),
    "span 0.05": ("batching.span=0.05",),
    "the last measurement alone": ("batching.span=0",),
}


def errors(runtime: Runtime, seconds: float, overrides: Sequence[str]) -> list[tuple[float, float]]:
    """Request of the norm test and the correct one, at points of a run."""
    found: list[tuple[float, float]] = []
    done = [0.0]

    def look(pool: LocalPool, record: Json) -> None:
        done[0] += sum(record["seconds"].values()) if record["round"] else 0.0
        due = done[0] >= (len(found) + 1) * seconds / POINTS
        if due and record.get("smoothed"):
            truth = true_request(pool, record["round"])
            smoothed = record["smoothed"]
            ratio = smoothed["trace"] / (0.64 * smoothed["squared_norm"]) if smoothed["squared_norm"] > 0 else math.inf
            found.append((ratio, truth))

    train_followed(runtime, [*COMMON, f"budget={seconds:g}seconds", *overrides], look)
    return found


def true_request(pool: LocalPool, key: int) -> float:
    """The norm test's request at the anchor, by single sequences."""
    table = pool.splits.train.table  # type: ignore[attr-defined]
    chosen = np.random.default_rng(key).choice(table.num_sequences, SEQUENCES, replace=False)
    flat_model, trainer = pool.flat_model, pool.trainers[0]
    flat_model.point_at(trainer.anchor)
    rows, sizes = per_sequence_gradients(flat_model, pool.objective, cast(TokenBatch, table.batch(chosen)))
    wide = rows.double()
    return norm_test(statistics_from_gram(wide @ wide.T, sizes.flatten().double(), sketch_size=None), 0.8).sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the simulated clock")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, overrides in VARIANTS.items():
        by_seed = []
        for seed in SEEDS:
            pairs = run_ranks(
                errors,
                [0, 0],
                options.seconds,
                [*overrides, f"seed={seed}"],
                cluster=PATIENT,
                timeout_seconds=TIMEOUT_SECONDS,
            )[0]
            usable = [(asked, truth) for asked, truth in pairs if math.isfinite(asked) and math.isfinite(truth)]
            logs = [math.log(asked / truth) for asked, truth in usable]
            by_seed.append(
                (math.sqrt(statistics.mean(log**2 for log in logs)), statistics.mean(logs), len(pairs) - len(logs))
            )
        shown = ", ".join(f"{error:.3f} (bias {bias:+.2f}, {lost} infinite)" for error, bias, lost in by_seed)
        print(f"request_error, {name} = {statistics.mean(error for error, *_ in by_seed):.3f}: {shown}", flush=True)


if __name__ == "__main__":
    main()
