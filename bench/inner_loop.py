"""Tokens per second of one worker in the inner phase, against a plain hand-written PyTorch loop.

Same model, optimizer (fused AdamW), clipping, batch, data and threads; pairs are interleaved.
"""

import numpy as np
import torch

from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.round.inner import InnerPhase
from common import interleave, median_ratio, parse, plain_update, report, spread
from helpers.lone import lone_trainer

UPDATES = 20


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--model", default="tiny", help="a config of conf/model (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    updates = UPDATES // 2 if options.quick else UPDATES
    settings = compose(
        [
            f"model={options.model}",
            "algorithm=diloco",
            "pool.trainers=1",
            "pool.workers_per_trainer=1",
            f"algorithm.updates_per_round={updates}",
            "inner.schedule=constant",
            "batching.request=none",
        ]
    )
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    batch, length, table = settings.batching.local_batch, settings.data.sequence_length, splits.table
    assert isinstance(table, TokenTable)

    trainer, slot = lone_trainer(settings, objective, objective.build(torch.device("cpu"), in_bf16=False), table)
    plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0])), None, PoolReport())

    def ours() -> None:
        InnerPhase(plan, settings).run([trainer], [slot])
        trainer.cursor.advance(plan.updates, 1, batch, {})

    model = objective.build(torch.device("cpu"), in_bf16=False)
    adam = settings.inner
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=adam.lr, betas=(adam.beta1, adam.beta2), weight_decay=adam.weight_decay, fused=True
    )
    tokens = torch.from_numpy(table.parts[0].astype(np.int64))
    rng = np.random.default_rng(0)

    def plain() -> None:
        for _ in range(updates):
            starts = rng.integers(0, len(tokens) - length - 1, size=batch)
            rows = torch.stack([tokens[start : start + length + 1] for start in starts])
            plain_update(model, optimizer, rows)

    ours_seconds, plain_seconds = interleave([ours, plain], rounds=12 if options.quick else 24)
    processed = updates * batch * length
    rows = [
        [name, *spread([processed / second for second in seconds])]
        for name, seconds in (("adloco_dist", ours_seconds), ("plain loop", plain_seconds))
    ]
    report(
        f"inner phase, {options.model}, {batch} x {length} tokens, 1 thread: tokens per second",
        ["", "min", "median", "max"],
        rows,
        {"inner_loop_ratio": median_ratio(plain_seconds, ours_seconds)},
        options.json,
    )


if __name__ == "__main__":
    main()
