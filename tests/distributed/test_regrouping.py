"""Trainers that merge and ranks that regroup, on real process groups: what every run keeps, through merges."""

import random
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import MergePolicy, MergeSettings
from adloco_dist.data.indexed import IndexedDataset
from adloco_dist.messages import decode
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge, TrainerView, choose_merge
from adloco_dist.policy.plan import PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.pool.capacity import micro_batch_bytes, state_vectors
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.regroup import regroup
from adloco_dist.run.rows import TrainerRow, merge_in_words
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from helpers.lone import lone_trainer
from helpers.processes import run_ranks
from helpers.support import (
    FOUR_TRAINERS,
    held_anchors,
    small_module,
    small_objective,
    small_settings,
    small_splits,
    small_store,
    train_poisoned_pool,
    train_small_pool,
)
from helpers.tables import CountingTable, deal, ids_of_shard

SHRINKING = (
    "pool.trainers=4", "pool.workers_per_trainer=2", "merge=worst_with_worst", "merge.every_rounds=2",
    "budget=9rounds", "batching.request=norm_test", "batching.eta=0.7", "inner.lr=5e-3", "evaluation.every=1rounds",
)  # fmt: skip
DECIDED = ("round", "trainer", "workers", "total_batch", "cursor", "tokens", "pool_tokens", "merge")


def decided(record: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on hosting."""
    detail = {key: record.get(key) for key in DECIDED}
    if detail["merge"]:
        shares = {member: round(share, 9) for member, share in detail["merge"]["shares"].items()}
        detail["merge"] = {"survivor": detail["merge"]["survivor"], "shares": shares}
    return detail


def test_a_shrinking_pool_on_any_ranks_is_the_same_run() -> None:
    """4 -> 3 -> 2 -> 1 trainers."""
    alone = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, *SHRINKING)
    counts = [sum(record["round"] == round_ for record in alone[0]["records"]) for round_ in range(10)]
    assert counts == [4, 4, 4, 3, 3, 2, 2, 1, 1, 1]
    (expected,) = held_anchors(alone).values()
    for nodes, placement in (([0, 0, 1, 1], "spread"), ([0, 0, 0], "pack")):
        elsewhere = run_ranks(train_small_pool, nodes, *FOUR_TRAINERS, *SHRINKING, f"pool.placement={placement}")
        (anchor,) = held_anchors(elsewhere).values()
        np.testing.assert_allclose(anchor, expected, rtol=0, atol=1e-9)
        for mine, theirs in zip(alone[0]["records"], elsewhere[0]["records"], strict=True):
            assert decided(mine) == decided(theirs)
            assert mine.get("train_loss") == pytest.approx(theirs.get("train_loss"), abs=1e-9)


def count_sequences(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    whole = small_store()
    table = CountingTable(whole.parts, whole.sequence_length)
    splits = replace(small_splits(), train=IndexedDataset(table))
    done = train_small_pool(runtime, *FOUR_TRAINERS, *overrides, splits=splits, prepare=lambda pool: table.read.clear())
    return {**done, "read": table.read}


@pytest.mark.parametrize("shards", ["disjoint", "shared"])
def test_a_census_of_sequences(shards: str) -> None:
    """Each sequence is used once per epoch, through merges: what all ranks really read."""
    overrides = (
        *SHRINKING, "pool.trainers=3", f"data.shards={shards}", "merge.every_rounds=3",
        "instances.concurrency=threads",
    )  # fmt: skip
    ranks = run_ranks(count_sequences, [0, 0, 0], *overrides)
    seen = Counter(sequence for rank in ranks for sequence in rank["read"])
    records = ranks[0]["records"]
    assert sum(seen.values()) == sum(record.get("sequences", 0) for record in records)
    assert [record["round"] for record in records if "merge" in record] == [4, 7]
    if shards == "shared":  # nothing is united: the survivor goes on where it was
        survivor = records[-1]["trainer"]
        taken = sum(record.get("sequences", 0) for record in records if record["trainer"] == survivor)
        assert records[-1]["cursor"] == taken
        return
    unread = set(ranks[0]["unread"][records[-1]["trainer"]])
    for shard in deal(small_store().num_sequences, 3, seed=0):
        ids = set(ids_of_shard(shard))
        maximum = max(seen[sequence] for sequence in ids)
        behind = {sequence for sequence in ids if seen[sequence] < maximum}
        assert all(seen[sequence] == maximum - 1 for sequence in behind)
        assert behind in (unread & ids, set())


WIDE = Layout.one_rank_per_worker({0: (0, 1), 1: (1, 2), 2: (2,), 3: (0,), 4: (0, 2)})


def merge_by_hand(runtime: Runtime, outer_state: str, *overrides: str) -> dict[str, Any]:
    """Five trainers with anchors and momenta of known numbers; 0, 1, 2 merge by requests 2, 3, 5, then 3 with 4."""
    settings = small_settings(*FOUR_TRAINERS, "pool.trainers=5", f"pool.outer_state={outer_state}", *overrides)
    pool = set_up_pool(settings, runtime, small_splits(), small_objective(settings), small_module(settings), WIDE)
    for trainer_id, trainer in pool.trainers.items():
        for vector, other, factor in zip(trainer.state().values(), (7.0, 3.0, 5.0), (1, -1, 2), strict=False):
            vector.fill_(other if trainer_id > 2 else factor * 10.0**trainer_id)
        for worker in trainer.workers:
            for moment in worker.vectors()[1:]:
                moment.fill_(100 * trainer_id + worker.id)
            worker.weights.copy_(trainer.anchor)
    if 4 in pool.trainers:
        pool.trainers[4].outer_vectors[0][5] = float("nan")
    first = plan_round(settings, find_plan_inputs(pool, WIDE, Trajectory()), None, PoolReport())
    before, bytes_sent = WIDE, {}
    for merge in (Merge(1, {0: 0.2, 1: 0.3, 2: 0.5}), Merge(3, {3: 1.0, 4: 0.0})):
        after = merge.layout_after(before)
        bytes_sent[merge.survivor] = regroup(pool, before, replace(first, merge=merge, layout=after)).bytes_sent
        before = after
    trainers = pool.trainers.values()
    return {
        "outer": {t.id: [vector.unique().tolist() for vector in t.state().values()] for t in trainers},
        "workers": {(t.id, w.id): w.vectors()[1][0].item() for t in trainers for w in t.workers},
        "at_anchor": all((w.weights == t.anchor).all() for t in trainers for w in t.workers),
        "sent": bytes_sent,
        "vector_bytes": pool.flat_model.gradient.nbytes,
        "shards": {trainer: cursor.size for trainer, cursor in pool.cursors.items()},
    }


@pytest.mark.parametrize("outer_state", ["device", "cpu"])
def test_a_merge_worked_by_hand(outer_state: str) -> None:
    """x = 0.2 * 1 + 0.3 * 10 + 0.5 * 100, the momentum the same way; averages of anchors begin anew. Trainer 4 is not
    finite and is left out."""
    ranks = run_ranks(merge_by_hand, [0, 0, 1], outer_state, "outer.average_span=0.1")
    for rank in ranks:
        assert rank["at_anchor"]
        assert rank["shards"] == {1: 72, 3: 48}
        for trainer, vectors in rank["outer"].items():
            assert [x for (x,) in vectors] == pytest.approx([53.2, -53.2, 53.2] if trainer == 1 else [7.0, 3.0, 7.0])
    assert [sorted(rank["outer"]) for rank in ranks] == [[1, 3], [1], [1, 3]]
    workers = {key: moment for rank in ranks for key, moment in rank["workers"].items()}
    # The survivor's own first, then the others' by trainer; moments stay, but those of a broken trainer's workers.
    assert workers == {(1, 0): 100, (1, 1): 101, (1, 2): 0, (1, 3): 1, (1, 4): 200, (3, 0): 300, (3, 1): 0, (3, 2): 0}
    # On its way to rank 2: trainer 3's vectors. An all-reduce over three ranks sends 4/3 of a vector each.
    maximum = max(sum(rank["sent"].values()) for rank in ranks)
    assert maximum < 2 * (4 / 3 + 1) * ranks[0]["vector_bytes"]


@pytest.mark.parametrize("outer_state", ["device", "cpu"])
def test_anchors_travel_to_a_merge_in_bf16_where_averages_are_compressed(outer_state: str) -> None:
    exact = run_ranks(merge_by_hand, [0, 0, 1], outer_state)
    ranks = run_ranks(merge_by_hand, [0, 0, 1], outer_state, "wire=int4")
    for rank, wide in zip(ranks, exact, strict=True):
        assert rank["at_anchor"]
        assert rank["outer"][1] == ranks[0]["outer"][1], "the same bits on all ranks"
        assert rank["outer"][1][0] == pytest.approx([53.2], rel=2**-8)
        assert rank["sent"][1] == wide["sent"][1] / 4, "of fp64"
        assert rank["sent"].get(3) == wide["sent"].get(3), "a trainer that only comes to another rank stays as it is"
        assert rank["outer"].get(3) == wide["outer"].get(3)


def test_a_trainer_that_is_not_finite_is_left_out_and_named() -> None:
    overrides = (*SHRINKING, "pool.trainers=3", "pool.workers_per_trainer=1", "budget=4rounds")
    ranks = run_ranks(train_poisoned_pool, [0, 0, 0], *FOUR_TRAINERS, *overrides)
    (merged,) = [record for record in ranks[0]["records"] if "merge" in record]
    assert merged["merge"]["shares"]["1"] == 0.0
    assert merged["workers"] == 2
    assert "trainer 1 (left out: not finite)" in merge_in_words(decode(TrainerRow, merged))
    assert all(np.isfinite(anchor).all() for anchor in held_anchors(ranks).values())
    assert merged["finite_workers"] == 2, "its worker starts again from the survivor's anchor"


@pytest.mark.parametrize(
    "overrides",
    [
        ("pool.trainers=1",),
        ("pool.trainers=2", "merge.width=9"),
        ("pool.trainers=3", "merge.min_trainers=3"),
        ("pool.trainers=3", "merge=best_with_worst", "merge.every_rounds=1"),
    ],
)
def test_nothing_hangs_at_the_edges(overrides: tuple[str, ...]) -> None:
    ranks = run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *SHRINKING, "budget=4rounds", *overrides)
    assert ranks[0]["stop"] == "budget=4rounds reached"
    expected = 3 if "merge.min_trainers=3" in overrides else 1
    assert len(ranks[0]["result"]["candidates"]) == (1 if expected == 1 else expected + 1)


def random_merges(runtime: Runtime, sequences: int) -> int:
    """Random layouts and merges, every plan applied, until one trainer is left; compared with plain arithmetic."""
    settings = small_settings(*FOUR_TRAINERS, "batching.capacity=8", "outer=nesterov", "evaluation.every=null")
    rng, control, num_plans = random.Random(0), runtime.control, 0
    objective, splits = small_objective(settings), small_splits()
    for _ in range(sequences):
        num_trainers = rng.randint(2, 5)
        before = Layout.one_rank_per_worker(
            {number: tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))) for number in range(num_trainers)}
        )
        pool = set_up_pool(settings, runtime, splits, objective, small_module(settings), before)
        values = {trainer_id: rng.uniform(-1, 1) for trainer_id in before.trainers}
        for trainer_id, trainer in pool.trainers.items():
            trainer.outer_vectors[0].fill_(values[trainer_id])
            trainer.outer_vectors[1].fill_(-values[trainer_id])
        plan = plan_round(settings, find_plan_inputs(pool, before, Trajectory()), None, PoolReport())
        while len(before.trainers) > 1:
            policy = rng.choice([MergePolicy.worst_with_worst, MergePolicy.best_with_worst])
            chosen = MergeSettings(policy=policy, width=rng.randint(2, 4))
            candidates = {
                trainer_id: TrainerView(rng.uniform(1, 9), rng.uniform(1, 9)) for trainer_id in before.trainers
            }
            merge = choose_merge(chosen, candidates)
            assert merge
            plan = replace(plan, merge=merge, layout=merge.layout_after(before))
            regroup(pool, before, plan)
            values[merge.survivor] = sum(share * values[member] for member, share in merge.shares.items())
            before, num_plans = plan.layout, num_plans + 1
            assert list(pool.trainers) == list(before.placed_on(runtime.rank))
            for trainer_id, trainer in pool.trainers.items():
                anchor, momentum = trainer.outer_vectors
                np.testing.assert_allclose(anchor.numpy(), values[trainer_id], atol=1e-12)
                np.testing.assert_allclose(momentum.numpy(), -values[trainer_id], atol=1e-12)
                assert [worker.id for worker in trainer.workers] == before.workers_on(runtime.rank, trainer_id)
            mine = {"formed": pool.groups.formed, "sums": {t.id: t.checksum() for t in pool.trainers.values()}}
            sums: dict[str, list[int]] = {}
            for other in control.exchange(mine):
                assert [tuple(ranks) for ranks in other["formed"]] == pool.groups.formed
                for trainer_id, checksum in other["sums"].items():
                    assert sums.setdefault(trainer_id, checksum) == checksum
            rank_sets = {before.ranks(trainer_id) for trainer_id in before.trainers}
            assert set(pool.groups.formed) == {ranks for ranks in rank_sets if len(ranks) > 1}
        pool.groups.keep([])
    return num_plans


def test_hundreds_of_random_merges_on_four_ranks() -> None:
    counts = run_ranks(random_merges, [0, 0, 1, 1], 120)
    assert min(counts) > 150


def shrink_in_little_memory(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    """Memory for the pool and a pass of 20 sequences, while there are two trainers."""
    settings = small_settings(*FOUR_TRAINERS, *overrides)
    _, slot = lone_trainer(settings, small_objective(settings), small_module(settings), small_store())
    two = micro_batch_bytes(slot, 2)
    vectors = sum(state_vectors(settings, 2, 2, slot.flat_model.matrix_share).values())
    memory = int(vectors * slot.flat_model.gradient.nbytes) + 10 * two
    trainers: list[weakref.ref[Any]] = []
    pools: list[LocalPool] = []

    def watch(pool: LocalPool) -> None:
        pools.append(pool)
        trainers.extend(weakref.ref(trainer) for trainer in pool.trainers.values())

    more = (f"cluster.memory_bytes={memory}", "batching.padding_fraction=1")
    done = train_small_pool(runtime, *FOUR_TRAINERS, *overrides, *more, prepare=watch)
    return {**done, "alive": [trainer() is not None for trainer in trainers]}


def test_memory_is_probed_again_after_a_merge() -> None:
    overrides = ("pool.trainers=2", "merge=worst_with_worst", "merge.every_rounds=2",
                 "batching.request=ramp", "batching.ramp_factor=8", "budget=5rounds")  # fmt: skip
    (done,) = run_ranks(shrink_in_little_memory, [0], *overrides)
    limits = [(record["round"], record.get("batch_limit")) for record in done["records"] if record["round"]]
    assert limits[:6] == [(1, 20), (1, 20), (2, 20), (2, 20), (3, 20), (4, 20)]
    assert limits[-1][1] > 20, "what a trainer took that has ended; known once it was probed"
    assert done["records"][-1]["passes"] == -(-done["records"][-1]["local_batch"] // limits[-1][1]) > 1
    assert sorted(done["alive"]) == [False, True], "what has ended takes no memory"
