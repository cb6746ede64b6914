"""Pools that read streams, and classifiers: the same run on any ranks, and after any interruption."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy.plan import INTERRUPTED
from helpers.corpora import write_streams
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS, held_anchors, train_small_pool

POOL = (
    "pool.trainers=3",
    "pool.workers_per_trainer=2",
    "budget=6rounds",
    "merge=worst_with_worst",
    "merge.every_rounds=2",
    "batching.request=norm_test",
    "checkpoint.every=null",
)


@pytest.fixture(scope="module")
def c4(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that name a small corpus: three shards for six workers."""
    return write_streams(tmp_path_factory.mktemp("c4"))


def kept(runtime: Runtime, folder: str, looks: int | None, overrides: tuple[str, ...]) -> dict[str, Any]:
    return train_kept(runtime, folder, looks, *FOUR_TRAINERS, *overrides)


def shards_of(ranks: list[dict[str, Any]]) -> dict[int, Any]:
    return {trainer: state for rank in ranks for trainer, state in rank["states"].items()}


def test_streams_and_merges_are_the_same_run_on_any_ranks(c4: tuple[str, ...]) -> None:
    overrides = (*POOL, *c4)
    alone = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, *overrides)
    spread = run_ranks(train_small_pool, [0, 0, 1], *FOUR_TRAINERS, *overrides, "pool.placement=spread")
    expected = held_anchors(alone)
    for trainer, anchor in held_anchors(spread).items():
        np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-9)
    assert shards_of(spread) == shards_of(alone), "every rank knows where every stream stands"
    (state,) = shards_of(alone).values()
    tokens = alone[0]["records"][-1]["pool_tokens"]
    assert sum(stream["ordinal"] for stream in state["streams"]) * 12 == tokens, "every sequence was taken once"
    assert len(state["streams"]) == 6


@pytest.mark.parametrize("looks", [9, 40, 55])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_streamed_run_that_is_stopped_goes_on_as_if_it_had_not(
    c4: tuple[str, ...], tmp_path: Path, looks: int, ranks: int
) -> None:
    """Bitwise on as many ranks; on another number, within what sums in another order differ by."""
    reference = run_ranks(kept, [0, 0], str(tmp_path / "reference"), None, (*POOL, *c4))
    stopped = run_ranks(kept, [0, 0], str(tmp_path / "run"), looks, (*POOL, *c4))
    assert {rank["stop"] for rank in stopped} == {INTERRUPTED}
    ended = run_ranks(kept, [0] * ranks, str(tmp_path / "run"), None, (*POOL, *c4))
    expected = held_anchors(reference)
    for trainer, anchor in held_anchors(ended).items():
        np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=0 if ranks == 2 else 1e-9)
    cursors = {trainer: cursor for rank in reference for trainer, cursor in rank["cursors"].items()}
    assert {trainer: cursor for rank in ended for trainer, cursor in rank["cursors"].items()} == cursors


def test_padded_documents_are_the_same_run_on_any_ranks(c4: tuple[str, ...]) -> None:
    overrides = (*POOL, *c4, "data.packing=document", "data.sequence_length=12")
    alone, spread = (run_ranks(train_small_pool, nodes, *FOUR_TRAINERS, *overrides) for nodes in ([0], [0, 1]))
    expected = held_anchors(alone)
    for trainer, anchor in held_anchors(spread).items():
        np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-9)


def test_a_classifier_is_the_same_run_on_any_ranks() -> None:
    overrides = ("pool.trainers=2", "pool.workers_per_trainer=2", "data=python_packages", "data.sequence_length=48",
                 "batching.request=norm_test", "merge=worst_with_worst", "merge.every_rounds=2")  # fmt: skip
    alone, spread = (run_ranks(train_classifier, nodes, *overrides) for nodes in ([0], [0, 1]))
    expected = held_anchors(alone)
    for trainer, anchor in held_anchors(spread).items():
        np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-9)
    record, other = alone[0]["records"][-1], spread[0]["records"][-1]
    assert 0 < record["validation_accuracy"] < 1
    assert record["validation_accuracy"] == other["validation_accuracy"]
    assert record["validation_loss"] == pytest.approx(other["validation_loss"], abs=1e-9)
    assert record["targets"] == record["sequences"], "one label each"


def train_classifier(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    return train_small_pool(runtime, *FOUR_TRAINERS, *overrides)


def test_what_is_left_out_of_a_damaged_shard_is_recorded(tmp_path: Path) -> None:
    corpus = write_streams(tmp_path)
    damaged = tmp_path / "c4-train.00001-of-00003.json.gz"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    # One worker reads the sound files, too: the others would have nothing but the damaged one.
    pool = [setting for setting in POOL if not setting.startswith(("pool.", "merge"))]
    overrides = (*pool, "pool.trainers=1", "merge=none", *corpus, "data.damaged=skip", "data.packing=document")
    (ended,) = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, *overrides)
    notes = [note for record in ended["records"] for note in record.get("notes", [])]
    assert any("c4-train.00001-of-00003.json.gz cannot be read after row" in note for note in notes), notes
