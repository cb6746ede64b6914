"""Resident memory per further co-hosted worker of the same trainer, against its weights and optimizer moments.

Each measurement is a process of its own that trains two rounds; its peak resident memory is read at the end.
"""

import argparse
import resource
import statistics
import subprocess
import sys

import numpy as np
import torch

from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.round.inner import InnerPhase
from common import parse, report, spread
from helpers.lone import lone_trainer

VOCAB_SIZE, LENGTH = 257, 64
VECTORS_PER_WORKER = 3
"""Weights and the two moments of AdamW."""


def measure(num_workers: int) -> None:
    """Train two rounds with `num_workers` workers of one trainer; print peak bytes and bytes of one flat vector."""
    torch.set_num_threads(1)
    settings = compose(
        ["model=small", "algorithm=diloco", "pool.trainers=1", f"pool.workers_per_trainer={num_workers}",
         "algorithm.updates_per_round=2", "batching.local_batch=2", "batching.request=none",
         f"data.sequence_length={LENGTH}"]
    )  # fmt: skip
    objective = LanguageObjective.fitted(settings, Vocabulary(VOCAB_SIZE))
    table = TokenTable([np.random.default_rng(0).integers(0, 256, 64_000).astype(np.uint16)], LENGTH)
    model = objective.build(torch.device("cpu"), in_bf16=False)
    trainer, slot = lone_trainer(settings, objective, model, table, range(num_workers))
    flat_model = slot.flat_model
    plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0])), None, PoolReport())
    for _ in range(2):
        InnerPhase(plan, settings).run([trainer], [slot])
        trainer.step(0, None)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(peak_bytes, flat_model.gradient.nbytes, flat_model.num_parameters)


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workers:
        measure(options.workers)
        return
    counts, repetitions = (1, 2, 4), 2 if options.quick else 5
    peaks: dict[int, list[float]] = {count: [] for count in counts}
    vector_bytes = num_parameters = 0
    for _ in range(repetitions):
        for count in counts:
            command = [sys.executable, __file__, "--workers", str(count)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peak, vector_bytes, num_parameters = map(int, output.split())
            peaks[count].append(peak)
    first, last = counts[0], counts[-1]
    per_worker = [(b - a) / (last - first) for a, b in zip(peaks[first], peaks[last], strict=True)]
    expected = VECTORS_PER_WORKER * vector_bytes
    rows = [[f"{count} workers: peak MB", *spread(peaks[count], 1e6)] for count in counts]
    rows.append(["per further worker, MB", *spread(per_worker, 1e6)])
    rows.append(["weights and moments, MB", "", f"{expected / 1e6:,.2f}", ""])
    report(
        f"resident memory, {num_parameters / 1e6:.1f}M parameters, one trainer on one rank",
        ["", "min", "median", "max"],
        rows,
        {"worker_memory_ratio": statistics.median(per_worker) / expected},
        options.json,
    )


if __name__ == "__main__":
    main()
