"""Is an average of anchors better than the last one? python experiments/anchors.py.

An exponential average costs a vector and no bytes. Here all anchors of a run are kept, averaged with several spans when
it has ended, and evaluated; with the default schedule, and with a constant rate, which an average might spare.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch
from cases import MEASURED, NANO, NANO_SHARE, SEEDS, TINY, link
from followed import PATIENT, TIMEOUT_SECONDS, train_followed

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.messages import Json
from adloco_dist.policy.evaluation import subsets
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.evaluate import evaluate
from helpers.processes import run_ranks

SPANS = (0.0, 0.02, 0.05, 0.1, 0.2)
"""Shares of the run over which an average decays by e; 0: the last anchor."""
COMMON = (*MEASURED, "pool.workers_per_trainer=2")
CONSTANT = "inner.schedule=constant"
SCHEDULES: dict[str, tuple[float, tuple[str, ...]]] = {
    "cosine to a tenth": (1.0, ()),
    "cosine to a tenth, twice the rate": (2.0, ()),
    "cosine to zero, twice the rate": (2.0, ("inner.final_lr_fraction=0",)),
    "constant rate": (1.0, (CONSTANT,)),
    "constant, half the rate": (0.5, (CONSTANT,)),
    "constant, twice the rate": (2.0, (CONSTANT,)),
}
"""Multiples of the rate that is the best for a cosine in second_machine, and the schedule."""
MODELS = {"nano": (4e-3, (*NANO, *link("10", NANO_SHARE))), "tiny": (2e-3, (*TINY, *link("10")))}


def losses(runtime: Runtime, overrides: Sequence[str]) -> list[float]:
    """The validation loss of the average with each span, on rank 0."""
    anchors: list[torch.Tensor] = []

    def look(pool: LocalPool, record: Json) -> None:
        anchors.append(pool.trainers[0].anchor.clone())

    pool = train_followed(runtime, overrides, look)
    if runtime.rank:
        return []
    anchors.append(pool.trainers[0].anchor.clone())
    chosen = subsets(pool.splits.validation.num_sequences, pool.settings.evaluation).final
    found = []
    for span in SPANS:
        mean = anchors[-1].clone()
        if span:
            keep = torch.exp(torch.tensor(-1 / (span * len(anchors)))).item()
            mean = anchors[0].clone()
            for anchor in anchors[1:]:
                mean.mul_(keep).add_(anchor, alpha=1 - keep)
        sums = evaluate(pool.flat_model, pool.objective, mean, pool.splits.validation, chosen, 64)
        found.append(sums.loss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the simulated clock")
    parser.add_argument("--model", choices=MODELS, default="nano")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    rate, place = MODELS[options.model]
    for name, (multiple, schedule) in SCHEDULES.items():
        overrides = [*COMMON, *place, *schedule, f"inner.lr={rate * multiple:g}", f"budget={options.seconds:g}seconds"]
        runs = [
            run_ranks(losses, [0, 0], [*overrides, f"seed={seed}"], cluster=PATIENT, timeout_seconds=TIMEOUT_SECONDS)[0]
            for seed in range(options.seeds)
        ]
        shown = ", ".join(
            f"span {span:g}: {statistics.mean(of_span):.4f} ({min(of_span):.4f} to {max(of_span):.4f})"
            for span, of_span in zip(SPANS, zip(*runs, strict=True), strict=True)
        )
        print(f"{name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
