"""How large a batch may be at a point of a run: python experiments/branch.py (2505.23971).

One worker trains; at three points it goes on for 2 % of the run with batches of 1, 2, 4 and 8 times the size, at the
rate times the root, several times with other sequences. What the average of each branch's weights has lost against the
smallest batch, at equal tokens, stands beside the noise scale that is measured there.
"""

import argparse
import copy
import math
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from by_hand import Plain
from cases import COMPARED, MEASURED
from machines import OF_MODEL

from adloco_dist.noise.estimation import statistics_from_gram

BATCH, MULTIPLES = 4, (1, 2, 4, 8)
POINTS = (0.25, 0.5, 0.75)
SHARE = 0.02
MEASURED_SEQUENCES = 128
"""Of which each has a gradient of its own, for the noise scale."""


def branch(plain: Plain, start: dict[str, object], multiple: int, sequences: int, rate: float, seed: int) -> float:
    """The loss of the average over the second half of a branch."""
    restore(plain, start)
    rng = np.random.default_rng([seed, 1])
    order, batch = rng.permutation(plain.table.num_sequences), BATCH * multiple
    updates = sequences // batch
    average, counted = [torch.zeros_like(parameter) for parameter in plain.parameters], 0
    for update in range(updates):
        plain.update(order[update * batch : (update + 1) * batch], rate * math.sqrt(multiple))
        if update >= updates // 2:
            counted += 1
            for mean, parameter in zip(average, plain.parameters, strict=True):
                mean.lerp_(parameter.detach(), 1 / counted)
    return plain.validation_loss(average)


def restore(plain: Plain, start: dict[str, object]) -> None:
    plain.module.load_state_dict(start["module"])  # type: ignore[arg-type]
    for optimizer, state in zip(plain.optimizers, start["optimizers"], strict=True):  # type: ignore[call-overload]
        optimizer.load_state_dict(copy.deepcopy(state))


def noise_scale(plain: Plain, seed: int) -> float:
    """tr(Sigma) / |G|^2 at the weights as they are, from gradients of single sequences."""
    chosen = np.random.default_rng([seed, 2]).choice(plain.table.num_sequences, MEASURED_SEQUENCES, replace=False)
    rows = []
    for sequence in chosen:
        loss, _ = plain.objective.loss(plain.module, plain.table.batch(np.array([sequence])))
        loss.backward()
        rows.append(torch.cat([p.grad.flatten() for p in plain.parameters if p.grad is not None]).double())
        plain.module.zero_grad(set_to_none=False)
    gradients = torch.stack(rows)
    return statistics_from_gram(gradients @ gradients.T, torch.ones(len(rows), dtype=torch.float64)).noise_scale


def explore(overrides: Sequence[str], updates: int, replicates: int, seed: int) -> None:
    """Train, and print a line for each point."""
    plain = Plain.of([*MEASURED, *COMPARED, "evaluation.final_sequences=512", *overrides, f"seed={seed}"])
    rate = plain.settings.inner.lr
    assert rate, "it is named below"
    order = np.random.default_rng(seed).permutation(plain.table.num_sequences)
    points = {round(point * updates): point for point in POINTS}
    for update in range(updates):
        warm = min(1.0, 0.1 + update / (0.1 * updates))
        plain.update(order[update * BATCH : (update + 1) * BATCH], rate * warm)
        if update not in points:
            continue
        start: dict[str, object] = {
            "module": copy.deepcopy(plain.module.state_dict()),
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in plain.optimizers],
        }
        measured = noise_scale(plain, update)
        sequences = round(SHARE * updates * BATCH / MULTIPLES[-1] / BATCH) * MULTIPLES[-1] * BATCH
        losses = {
            multiple: [branch(plain, start, multiple, sequences, rate, number) for number in range(replicates)]
            for multiple in MULTIPLES
        }
        restore(plain, start)
        means = {multiple: statistics.mean(found) for multiple, found in losses.items()}
        shown = ", ".join(f"{BATCH * m}: {means[m] - means[1]:+.4f}" for m in MULTIPLES[1:])
        spread = statistics.stdev(losses[1]) / math.sqrt(replicates)
        where = f"{' '.join(overrides)}, seed {seed}, {points[update]:.0%}"
        smallest = f"loss with batches of {BATCH} {means[1]:.4f} (standard error {spread:.4f})"
        print(f"{where}: noise scale {measured:.1f}; {smallest}, {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano", choices=OF_MODEL)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--replicates", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for optimizer, lr in (("adamw", 1e-3), ("muon", 2.5e-3)):
            rate = lr * OF_MODEL[options.model]
            chosen = (f"model={options.model}", f"inner={optimizer}", f"inner.lr={rate:g}")
            explore(chosen, options.updates, options.replicates, seed)


if __name__ == "__main__":
    main()
