"""A small pool on made-up text, for tests that train in this process or on forked ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.batch import Batch
from adloco_dist.data.corpora import Splits, load_corpus
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.shards import Shard
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.batch import BatchPlan, BatchPremises, BatchReport, first_demand, next_demand, take
from adloco_dist.decisions.layout import experiment_layout
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.hosting import Rank, find_premises, host
from adloco_dist.losses import losses
from adloco_dist.models import build_model, model_config
from adloco_dist.run.journal import Journal
from adloco_dist.testing.records import KeptRecords
from adloco_dist.train import train

CPU = torch.device("cpu")
Matrix = npt.NDArray[np.float64]
VOCAB_SIZE, SEQUENCE_LENGTH = 23, 12
SMALL = (
    "precision=fp64",
    "model=causal",
    # GPT-2 computes in the model's own type throughout (Llama's norms compute in fp32): passes of other sizes agree to
    # the last bits of fp64.
    "model.architecture=gpt2",
    *(f"+model.overrides.{field}" for field in ("n_embd=16", "n_layer=2", "n_head=2")),
    *(f"+model.overrides.{part}_pdrop=0.0" for part in ("resid", "embd", "attn")),
    f"data.sequence_length={SEQUENCE_LENGTH}",
    "algorithm.updates_per_round=3",
    "batching.local_batch=2",
    "batching.request=none",
    "merge=none",
    "budget=rounds",
    "budget.rounds=4",
    "evaluation.every_rounds=2",
)


def first_batch(settings: Settings, premises: BatchPremises, replayed: int | None = None) -> BatchPlan:
    return take(settings, premises, first_demand(settings, premises, replayed), None, BatchReport())


def next_batch(
    settings: Settings, premises: BatchPremises, last: BatchPlan, report: BatchReport, fraction: float,
    replayed: int | None = None,
) -> BatchPlan:  # fmt: skip
    demand = next_demand(settings, premises, last, report, replayed, fraction)
    return take(settings, premises, demand, last, report)


def small_settings(*overrides: str) -> Settings:
    return compose([*SMALL, *overrides])


def small_splits(num_sequences: int = 120) -> Splits:
    """Text of a Markov chain, so that there is something to learn."""
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 2, 5], size=num_sequences * SEQUENCE_LENGTH + 1, p=[0.7, 0.2, 0.1])
    tokens = (np.cumsum(steps) % VOCAB_SIZE).astype(np.uint16)
    train = TokenStore([tokens], SEQUENCE_LENGTH)
    validation = TokenStore([tokens[: 20 * SEQUENCE_LENGTH]], SEQUENCE_LENGTH)
    return Splits(train, validation, Vocabulary(VOCAB_SIZE), source="a Markov chain", digest="")


def small_store() -> TokenStore:
    """The training sequences of `small_splits`."""
    store = small_splits().train
    assert isinstance(store, TokenStore)
    return store


def small_module(settings: Settings) -> PreTrainedModel:
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    return build_model(settings.model, config, settings.seed)


def corpus_and_module(settings: Settings) -> tuple[Splits, PreTrainedModel]:
    """The Markov chain, or what the settings name, and a module for its vocabulary."""
    if not settings.data.train and not settings.data.is_labelled:
        return small_splits(), small_module(settings)
    splits = load_corpus(settings.data, settings.seed)
    config = model_config(settings.model, splits.vocabulary, settings.data.sequence_length, splits.num_labels)
    return splits, build_model(settings.model, config, settings.seed, settings.data.is_labelled)


def first_sequences(count: int, splits: Splits | None = None) -> Batch:
    """The first `count` training sequences."""
    return (splits or small_splits()).train.batch(np.arange(count))  # pyright: ignore[reportArgumentType]


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
    trajectory: Trajectory | None = None,
    splits: Splits | None = None,
    prepare: Callable[[Rank], None] = lambda rank: None,
) -> dict[str, Any]:
    """Train and return this rank's anchors (by trainer), cursors, the result, and on rank 0 the records.

    Args:
        prepare: changes what the rank works with before the first round.
    """
    settings = small_settings(*overrides)
    sink = KeptRecords([])
    layout = experiment_layout(settings, runtime.nodes)
    own_splits, own_module = corpus_and_module(settings)
    rank = host(settings, runtime, splits or own_splits, module or own_module, layout)
    premises = find_premises(rank, layout, trajectory or Trajectory())
    prepare(rank)
    outcome = train(rank, premises, Journal([sink] if runtime.rank == 0 else []), StopRequest())
    trainers = outcome.rank.trainers.values()
    shards = {trainer.id: trainer.shard for trainer in trainers}
    return {
        "anchors": {trainer.id: trainer.anchor.numpy(force=True).copy() for trainer in trainers},
        "unread": {id: shard.unread().tolist() for id, shard in shards.items() if isinstance(shard, Shard)},
        "cursors": {id: shard.cursor for id, shard in shards.items()},
        "states": {id: shard.state() for id, shard in shards.items()},
        "chosen": None if outcome.weights is None else outcome.weights.numpy(force=True).copy(),
        "result": outcome.result,
        "stop": outcome.stop,
        "records": sink.records,
    }


def held_anchors(ranks: list[dict[str, Any]]) -> dict[int, Matrix]:
    """Every trainer's anchor, after a check that all its ranks hold the same bits (invariant 3)."""
    held: dict[int, Matrix] = {}
    for rank in ranks:
        for trainer, anchor in rank["anchors"].items():
            assert np.array_equal(held.setdefault(trainer, anchor), anchor, equal_nan=True), f"trainer {trainer}"
    return held


def train_poisoned_pool(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    """As `train_small_pool`, with an anchor of trainer 1 that is not finite."""

    def poison(rank: Rank) -> None:
        for trainer in rank.trainers.values():
            if trainer.id == 1:
                trainer.anchor[3] = float("nan")

    return train_small_pool(runtime, *overrides, prepare=poison)
