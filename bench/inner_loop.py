"""Tokens per second of one worker in the inner phase, against a plain hand-written PyTorch loop, by optimizer; and the
share of an update of `small` in which Muon orthogonalises.

Same model, optimizer (torch's fused AdamW; torch's Muon beside it), clipping, batch, data and threads; pairs are
interleaved.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from adloco_dist.config import InnerOptimizer, InnerSettings, Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.pool.muon import orthogonalized
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.inner import InnerPhase
from common import interleave, median_ratio, parse, plain_update, report, spread
from helpers.lone import lone_trainer

UPDATES = 20
SHARE_OF = ("model=small", "data.sequence_length=512", "batching.local_batch=8")
"""An update whose orthogonal share is measured, on two cores."""


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--model", default="tiny", help="a config of conf/model (%(default)s)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    rows = []
    for optimizer in ("adamw", "muon"):
        torch.set_num_threads(1)
        ratio, own = inner_loop(options.model, optimizer, options.quick)
        figures["inner_loop_ratio" if optimizer == "adamw" else f"inner_loop_ratio_{optimizer}"] = ratio
        rows += own
    torch.set_num_threads(2)
    figures["orthogonal_share"] = orthogonal_share(3 if options.quick else 7)
    report(
        f"inner phase, {options.model}, 1 thread: tokens per second",
        ["", "min", "median", "max"],
        rows,
        figures,
        options.json,
    )


def inner_loop(model_name: str, optimizer_name: str, is_quick: bool) -> tuple[float, list[list[str]]]:
    """Our tokens per second over a plain loop's, and the rows of the table."""
    updates = UPDATES // 2 if is_quick else UPDATES
    trainer, slot, settings, objective = worker_of(
        f"model={model_name}", f"inner={optimizer_name}", f"algorithm.updates_range=[{updates},{updates}]"
    )
    batch, length = settings.batching.local_batch, settings.data.sequence_length
    table: Any = trainer.cursor.table  # type: ignore[attr-defined]
    plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0])), None, PoolReport())

    def ours() -> None:
        InnerPhase(plan, settings).run([trainer], [slot])
        trainer.cursor.advance(batch, (plan.updates,), {})

    model = objective.build(torch.device("cpu"), in_bf16=False)
    optimizer = by_hand(model, settings.inner)
    tokens = torch.from_numpy(table.parts[0].astype(np.int64))
    rng = np.random.default_rng(0)

    def plain() -> None:
        for _ in range(updates):
            starts = rng.integers(0, len(tokens) - length - 1, size=batch)
            rows = torch.stack([tokens[start : start + length + 1] for start in starts])
            plain_update(model, optimizer, rows)

    ours_seconds, plain_seconds = interleave([ours, plain], rounds=12 if is_quick else 24)
    processed = plan.updates * batch * length
    rows = [
        [f"{name}, {optimizer_name}, {batch} x {length}", *spread([processed / second for second in seconds])]
        for name, seconds in (("adloco_dist", ours_seconds), ("plain loop", plain_seconds))
    ]
    return median_ratio(plain_seconds, ours_seconds), rows


def orthogonal_share(rounds: int) -> float:
    """The time of orthogonalising over that of the whole update."""
    trainer, slot, settings, _ = worker_of(*SHARE_OF, "inner=muon", "algorithm.updates_range=[2,2]")
    plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0])), None, PoolReport())
    matrices = [torch.randn(one.stack) for one in slot.flat_model.hidden_matrices.values()]

    def update() -> None:
        InnerPhase(plan, settings).run([trainer], [slot])

    def orthogonalize() -> None:
        for matrix in matrices:
            orthogonalized(matrix, slot.flat_model.product_dtype)

    whole, share = interleave([update, orthogonalize], rounds, warmup=1)
    return plan.updates * median_ratio(share, whole)


def worker_of(*overrides: str) -> tuple[Trainer, ComputeSlot, Settings, LanguageObjective]:
    """A worker by itself, on the standard library."""
    one = ("pool.trainers=1", "pool.workers_per_trainer=1", "batching.request=none")
    settings = compose([*overrides, *one, "algorithm.updates_per_round=1"])
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    assert isinstance(splits.table, TokenTable)
    return *lone_trainer(settings, objective, module, splits.table), settings, objective


def by_hand(model: nn.Module, inner: InnerSettings) -> torch.optim.Optimizer:
    """torch's optimizers of a model's parameters, as one."""
    betas, rate = (inner.beta1, inner.beta2), 1e-3  # whatever it is, an update takes as long
    if inner.optimizer is InnerOptimizer.adamw:
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=inner.weight_decay, fused=True)
    hidden = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "embed" not in name]
    rest = [parameter for name, parameter in model.named_parameters() if parameter.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(hidden, rate, inner.weight_decay, inner.momentum, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=rate, betas=betas, weight_decay=inner.weight_decay, fused=True)
    both: Any = SimpleNamespace(
        zero_grad=lambda: (muon.zero_grad(), adamw.zero_grad()), step=lambda: (muon.step(), adamw.step())
    )
    return both


if __name__ == "__main__":
    main()
