"""algorithm=ddp with batches whose ranks have different numbers of targets."""

from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Precision
from adloco_dist.data.corpora import TextSplits, indexed_splits
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import DocumentTable
from adloco_dist.objective.losses import losses
from adloco_dist.pool.flat_model import FlatModel
from helpers.processes import run_ranks
from helpers.support import (
    CPU,
    FOUR_TRAINERS,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    held_anchors,
    small_module,
    small_settings,
    train_small_pool,
)
from helpers.tables import deal

BATCH, LR = 3, 0.5
DDP = (
    "algorithm=ddp", "pool.trainers=1", "pool.workers_per_trainer=null", f"batching.local_batch={BATCH}",
    "algorithm.updates_per_round=1", "budget=1rounds", "inner=sgd", "inner.momentum=0", "inner.weight_decay=0",
    f"inner.lr={LR}", "inner.schedule=constant",
)  # fmt: skip


def documents() -> TextSplits:
    """Of different lengths, so that no two ranks predict as many tokens."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, SEQUENCE_LENGTH + 1, size=24)
    texts = [rng.integers(0, VOCAB_SIZE, size=length).astype(np.uint16) for length in lengths]
    table = DocumentTable(texts, pad=0)
    return indexed_splits(table, table, Vocabulary(VOCAB_SIZE), "documents")


def train_on_documents(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    return train_small_pool(runtime, *FOUR_TRAINERS, *DDP, *overrides, splits=documents())


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("capacity", ["null", "2"])
def test_every_target_of_all_ranks_weighs_the_same(clip_norm: float | None, capacity: str) -> None:
    overrides = (f"inner.clip_norm={clip_norm or 'null'}", f"batching.capacity={capacity}")
    ranks = run_ranks(train_on_documents, [0, 0], *overrides)
    (anchor,) = held_anchors(ranks).values()
    flat_model = FlatModel(small_module(small_settings()), CPU, Precision.fp64)
    expected = flat_model.initial_weights()
    (shard,) = deal(24, 1, seed=0)
    table = documents().table
    assert table is not None
    batches = [table.batch(shard.peek(worker * BATCH, BATCH)) for worker in range(2)]
    counts = [batch.total_targets for batch in batches]
    assert counts[0] != counts[1]
    losses_of_all = torch.stack([losses(flat_model.module, batch).sum() for batch in batches])
    (losses_of_all.sum() / sum(counts)).backward()
    gradient = flat_model.gradient
    norm = float(torch.linalg.vector_norm(gradient))
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
    np.testing.assert_allclose(anchor, (expected - LR * factor * gradient).numpy(), rtol=0, atol=1e-6 * LR)
    (record,) = (row for row in ranks[0]["records"] if row["round"] == 1)
    assert record["targets"] == sum(counts)
    num_parameters = flat_model.buffer_boundary
    assert record["bytes_sent"]["gradients"] == 2 * 8 * (num_parameters + 1), "and their number"
