"""A small pool on made-up text, for tests that train in this process or on forked ranks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, indexed_splits, load_corpus
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.indexed import ShardCursor
from adloco_dist.data.items import ItemBatch
from adloco_dist.data.own import OwnSplits, own_splits
from adloco_dist.data.protocols import Splits
from adloco_dist.data.tokens import TextTable, TokenBatch, TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.losses import losses
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.batch import BatchInputs, BatchPlan, BatchReport, next_target, take
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.replay import Trajectory
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.trainer import Trainer
from adloco_dist.run.journal import Journal
from adloco_dist.setup.building import build_module
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import train
from helpers.lone import lone_trainer
from helpers.records import KeptRecords

CPU = torch.device("cpu")
Matrix = npt.NDArray[np.float64]
VOCAB_SIZE, SEQUENCE_LENGTH = 23, 12
GPT2 = (
    # It computes in the model's own type throughout (Llama's norms compute in fp32): passes of other sizes agree to the
    # last bits of fp64.
    "model.architecture=gpt2",
    *(f"+model.overrides.{field}" for field in ("n_embd=16", "n_layer=2", "n_head=2")),
    *(f"+model.overrides.{part}_pdrop=0.0" for part in ("resid", "embd", "attn")),
)
LLAMA = (
    "model.architecture=llama",
    *(f"+model.overrides.{field}" for field in ("hidden_size=16", "intermediate_size=32", "num_hidden_layers=2")),
    *(f"+model.overrides.{field}" for field in ("num_attention_heads=4", "num_key_value_heads=2")),
)
SMALL = (
    "precision=fp64",
    "model=causal",
    *GPT2,
    f"data.sequence_length={SEQUENCE_LENGTH}",
    "pool.workers_per_trainer=2",
    "algorithm.updates_per_round=3",
    "batching.local_batch=2",
    "budget=4rounds",
    "evaluation.every=2rounds",
)
"""What is trained by default, made small: one trainer; its rounds follow the link, and its batches follow progress."""
SIMULATED_CLOCK = ("simulation.update_seconds=1", "simulation.sequence_seconds=0.01", "simulation.bytes_per_second=1e4")
"""After SMALL: rounds and batches follow this clock, and so repeat."""
FOUR_TRAINERS = (
    "algorithm=diloco",
    "pool.trainers=4",
    "pool.workers_per_trainer=1",
    "batching.request=none",
    "batching.every_updates=1",
    "inner.warmup_fraction=0",
    "merge=none",
)
"""After SMALL: DiLoCo as published, four times; whoever merges them says how."""


def first_batch(settings: Settings, inputs: BatchInputs, replayed: int | None = None) -> BatchPlan:
    target = next_target(settings.batching, inputs, None, BatchReport(), replayed, 0.0, 0)
    return take(settings.batching, inputs, target, None, BatchReport())


def next_batch(
    settings: Settings,
    inputs: BatchInputs,
    last: BatchPlan,
    report: BatchReport,
    spent_fraction: float,
    tokens: int,
    replayed: int | None = None,
) -> BatchPlan:
    target = next_target(settings.batching, inputs, last, report, replayed, spent_fraction, tokens)
    return take(settings.batching, inputs, target, last, report)


@cache
def small_settings(*overrides: str) -> Settings:
    small = [setting for setting in SMALL if LLAMA[0] not in overrides or setting not in GPT2]
    return compose([*small, *overrides])


def small_splits(num_sequences: int = 120) -> TextSplits:
    """Text of a Markov chain, so that there is something to learn."""
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 2, 5], size=num_sequences * SEQUENCE_LENGTH + 1, p=[0.7, 0.2, 0.1])
    tokens = (np.cumsum(steps) % VOCAB_SIZE).astype(np.uint16)
    table = TokenTable([tokens], SEQUENCE_LENGTH)
    validation = TokenTable([tokens[: 20 * SEQUENCE_LENGTH]], SEQUENCE_LENGTH)
    return indexed_splits(table, validation, Vocabulary(VOCAB_SIZE), "a Markov chain")


def small_store() -> TokenTable:
    """The training sequences of `small_splits`."""
    table = small_splits().table
    assert isinstance(table, TokenTable)
    return table


def small_objective(settings: Settings) -> LanguageObjective:
    return LanguageObjective.fitted(settings, Vocabulary(VOCAB_SIZE))


def small_module(settings: Settings) -> PreTrainedModel:
    return small_objective(settings).build(CPU, in_bf16=False)


def corpus_and_model(settings: Settings) -> tuple[TextSplits, LanguageObjective, PreTrainedModel]:
    """The Markov chain, or what the settings name, and a model for its vocabulary."""
    is_small = not settings.data.train and not settings.data.is_labelled
    splits = small_splits() if is_small else load_corpus(settings.data, settings.seed)
    objective = LanguageObjective.fitted(settings, splits.vocabulary, splits.labels)
    return splits, objective, objective.build(CPU, in_bf16=False)


def new_trainer(settings: Settings, num_workers: int) -> Trainer:
    """A trainer of the small model by itself, whose shard is all of the small text."""
    return lone_trainer(settings, small_objective(settings), small_module(settings), small_store(), range(num_workers))[
        0
    ]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The sequences of a table as a user's own data set."""

    def __init__(self, table: TextTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_sequences

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._table.batch(np.array([index])).tokens[0]


def pack(rows: list[torch.Tensor]) -> TokenBatch:
    return TokenBatch.packed(torch.stack(rows))


def own_small_splits() -> OwnSplits:
    """`small_splits` as a user would bring them."""
    splits = small_splits()
    return own_splits(lambda: (Rows(small_store()), Rows(splits.validation)), pack)


def own_first_batch(count: int) -> ItemBatch:
    return own_small_splits().first_batch(count)


def first_sequences(count: int, splits: TextSplits | None = None) -> TokenBatch:
    """The first `count` training sequences."""
    table = (splits or small_splits()).table
    assert table is not None
    return table.batch(np.arange(count))


def sequence_gradients(count: int) -> Matrix:
    """The gradients of the first `count` sequences, one backward pass each: (count, parameters)."""
    module = small_module(small_settings()).double()
    rows = []
    for sequence in first_sequences(count).split(1):
        module.zero_grad()
        losses(module, sequence).mean().backward()
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).numpy())
    return np.stack(rows)


def train_small_pool(
    runtime: Runtime,
    *overrides: str,
    module: torch.nn.Module | None = None,
    objective: Objective | None = None,
    trajectory: Trajectory | None = None,
    splits: Splits | None = None,
    prepare: Callable[[LocalPool], None] = lambda pool: None,
) -> dict[str, Any]:
    """Train and return this rank's anchors (by trainer), cursors, the result, and on rank 0 the records.

    Args:
        module, objective: what is trained; None: what the settings name.
        prepare: changes the pool before the first round.
    """
    settings = small_settings(*overrides)
    sink = KeptRecords([])
    layout = experiment_layout(settings, runtime.nodes)
    own_splits, built_in, own_module = corpus_and_model(settings)
    objective = objective or built_in
    if settings.pool.ranks_per_worker > 1:
        own_module = build_module(objective, settings, runtime)
    pool = set_up_pool(settings, runtime, splits or own_splits, objective, module or own_module, layout)
    inputs = find_plan_inputs(pool, layout, trajectory or Trajectory())
    prepare(pool)
    outcome = train(pool, inputs, Journal([sink] if runtime.rank == 0 else []), StopRequest())
    trainers = outcome.pool.trainers.values()
    cursors = {trainer.id: trainer.cursor for trainer in trainers}
    return {
        "anchors": {trainer.id: trainer.anchor.numpy(force=True).copy() for trainer in trainers},
        "unread": {
            trainer_id: cursor.unread().tolist()
            for trainer_id, cursor in cursors.items()
            if isinstance(cursor, ShardCursor)
        },
        "cursors": {trainer_id: cursor.position for trainer_id, cursor in cursors.items()},
        "states": {trainer_id: cursor.state_dict() for trainer_id, cursor in cursors.items()},
        "chosen": None if outcome.weights is None else outcome.weights.numpy(force=True).copy(),
        "result": outcome.result,
        "stop": outcome.stop,
        "records": sink.records,
    }


def held_anchors(ranks: list[dict[str, Any]]) -> dict[int, Matrix]:
    """Every trainer's anchor, after a check that all its ranks hold the same bits."""
    held: dict[int, Matrix] = {}
    for rank in ranks:
        for trainer, anchor in rank["anchors"].items():
            assert np.array_equal(held.setdefault(trainer, anchor), anchor, equal_nan=True), f"trainer {trainer}"
    return held


def train_poisoned_pool(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    """As `train_small_pool`, with an anchor of trainer 1 that is not finite."""

    def poison(pool: LocalPool) -> None:
        for trainer in pool.trainers.values():
            if trainer.id == 1:
                trainer.anchor[3] = float("nan")

    return train_small_pool(runtime, *overrides, prepare=poison)
