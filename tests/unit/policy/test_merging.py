"""Who merges with whom, and who works for whom afterwards: pure functions against hand-worked cases."""

import json
import math
import random
from collections import Counter

import pytest

from adloco_dist.config import MergePolicy, MergeSettings, MergeWeights, ReleasedWorkers
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge, choose_merges
from adloco_dist.policy.regrouping import Regrouping, assign_workers, transfers
from adloco_dist.policy.views import TrainerView

FIVE = {
    0: TrainerView(30.0, 20.0),
    1: TrainerView(4.0, 4.0),
    2: TrainerView(math.inf, 12.0),
    3: TrainerView(4.0, 6.0),
    4: TrainerView(9.0, 10.0),
}


def chosen(merge: MergeSettings, candidates: dict[int, TrainerView]) -> list[tuple[int, dict[int, float]]]:
    return [(one.survivor, dict(one.shares)) for one in choose_merges(merge, candidates)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MergeSettings(), [(1, {1: 0.4, 3: 0.6})]),
        (MergeSettings(width=3), [(4, {1: 0.2, 3: 0.3, 4: 0.5})]),
        (MergeSettings(weights=MergeWeights.uniform), [(1, {1: 0.5, 3: 0.5})]),
        (MergeSettings(policy=MergePolicy.best_with_worst), [(2, {1: 0.25, 2: 0.75})]),
        (MergeSettings(policy=MergePolicy.none), []),
        (MergeSettings(min_trainers=5), []),
        (MergeSettings(min_trainers=4, width=4), [(1, {1: 0.4, 3: 0.6})]),
        (MergeSettings(min_trainers=7), []),
        (MergeSettings(simultaneous=2), [(1, {1: 0.4, 3: 0.6}), (0, {0: 2 / 3, 4: 1 / 3})]),
        (MergeSettings(simultaneous=2, min_trainers=4), [(1, {1: 0.4, 3: 0.6})]),
        (
            MergeSettings(simultaneous=9, policy=MergePolicy.best_with_worst),
            [(2, {1: 0.25, 2: 0.75}), (0, {0: 20 / 26, 3: 6 / 26})],
        ),
    ],
)
def test_requests_before_bounds_choose_and_bounded_ones_weigh(
    settings: MergeSettings, expected: list[tuple[int, dict[int, float]]]
) -> None:
    """Ties: the lower id is the weaker, and where equal ones are left the lower id survives."""
    found = chosen(settings, FIVE)
    assert [survivor for survivor, _ in found] == [survivor for survivor, _ in expected]
    for (_, shares), (_, wanted) in zip(found, expected, strict=True):
        assert shares == pytest.approx(wanted)


def test_widths_beyond_the_pool() -> None:
    assert chosen(MergeSettings(width=99), FIVE)[0][0] == 2, "all five into the one with the largest request"
    assert chosen(MergeSettings(width=99), {0: TrainerView(1, 1)}) == []
    assert chosen(MergeSettings(), {}) == []


def test_equal_requests_are_the_plain_mean() -> None:
    assert chosen(MergeSettings(width=4), {trainer: TrainerView(8.0, 8.0) for trainer in range(4)}) == [
        (0, dict.fromkeys(range(4), 0.25))
    ]


def test_a_trainer_that_is_not_finite_ends_without_a_share() -> None:
    broken = {**FIVE, 0: TrainerView(30.0, 20.0, is_finite=False)}
    assert chosen(MergeSettings(), broken) == [(1, {0: 0.0, 1: 1.0})]
    assert chosen(MergeSettings(policy=MergePolicy.best_with_worst), broken) == [(2, {0: 0.0, 2: 1.0})]
    more = {**broken, 2: TrainerView(math.inf, 12.0, is_finite=False)}
    assert chosen(MergeSettings(), more) == [(1, {0: 0.0, 1: 1.0})], "two that are broken cannot save each other"
    all_broken = {trainer: TrainerView(2.0, 2.0, is_finite=False) for trainer in range(3)}
    assert chosen(MergeSettings(), all_broken) == []


LAYOUT = Layout.one_rank_per_worker({0: (0, 1), 1: (1, 2), 2: (3,), 3: (0, 3, 3)})
TWO_MERGES = (
    Merge(3, {1: 0.5, 3: 0.5}, {1: TrainerView(2, 2), 3: TrainerView(2, 2)}),
    Merge(0, {0: 1.0, 2: 0.0}, {0: TrainerView(9, 9), 2: TrainerView(9, 9, is_finite=False)}),
)


def regroup(
    layout: Layout,
    merges: tuple[Merge, ...],
    released_workers: ReleasedWorkers,
    requests: dict[int, float] | None = None,
    sizes: dict[int, int] | None = None,
) -> Regrouping:
    return Regrouping(merges, assign_workers(layout, merges, released_workers, requests or {}, sizes or {}))


def test_freed_workers_join_where_they_are() -> None:
    regrouping = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.join)
    assert regrouping.origins == {0: ((0, 0), (0, 1), (2, 0)), 3: ((3, 0), (3, 1), (3, 2), (1, 0), (1, 1))}
    after = regrouping.layout_after(LAYOUT)
    assert after == Layout.one_rank_per_worker({0: (0, 1, 3), 3: (0, 3, 3, 1, 2)})
    assert regrouping.ranks(LAYOUT) == {0, 1, 2, 3}, "rank 0 has the workers that it had, but shards have grown"


def test_freed_workers_retire() -> None:
    regrouping = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.retire)
    assert regrouping.layout_after(LAYOUT) == Layout.one_rank_per_worker({0: (0, 1), 3: (0, 3, 3)})
    alone = regroup(LAYOUT, TWO_MERGES[1:], ReleasedWorkers.retire)
    assert alone.ranks(LAYOUT) == {0, 1, 3}, "nothing changes on rank 2"


def test_workers_are_dealt_anew_in_proportion_to_requests() -> None:
    """8 workers over requests 3 and 1: six and two; a shard of four sequences takes no fifth worker."""
    regrouping = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.redistribute, {0: 3.0, 3: 1.0}, {0: 99, 3: 99})
    assert regrouping.origins == {
        0: ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 2)),
        3: ((3, 0), (3, 1)),
    }
    capped = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.redistribute, {0: 3.0, 3: 1.0}, {0: 4, 3: 99})
    assert [len(capped.origins[trainer]) for trainer in (0, 3)] == [4, 4]
    tiny = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.redistribute, {0: 1e9, 3: 1.0}, {0: 99, 3: 99})
    assert [len(tiny.origins[trainer]) for trainer in (0, 3)] == [7, 1], "at least one each"


@pytest.mark.parametrize("released_workers", ReleasedWorkers)
def test_who_works_for_whom_does_not_depend_on_the_layout(released_workers: ReleasedWorkers) -> None:
    elsewhere = Layout.one_rank_per_worker({0: (5, 0), 1: (0, 0), 2: (2,), 3: (1, 4, 7)})
    requests, sizes = {0: 3.0, 3: 1.5}, {0: 50, 3: 50}
    here, there = (regroup(layout, TWO_MERGES, released_workers, requests, sizes) for layout in (LAYOUT, elsewhere))
    assert here.origins == there.origins
    assert decode(Regrouping, json.loads(json.dumps(encode(here)))) == here


def test_what_is_sent_for_a_merge() -> None:
    """Trainer 3's ranks 0, 3 and trainer 1's ranks 1, 2 together; trainer 2 has no share, its rank only receives."""
    regrouping = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.join)
    into_0, into_3 = transfers(LAYOUT, regrouping.layout_after(LAYOUT), regrouping)
    assert (into_0.trainer, dict(into_0.shares), into_0.ranks) == (0, {0: 1.0}, (0, 1, 3))
    assert into_0.holders == {0: (0, 1)}
    assert (into_3.trainer, into_3.ranks, into_3.holders) == (3, (0, 1, 2, 3), {1: (1, 2), 3: (0, 3)})
    sent = {(s, r): into_3.sent(s, r) for s in into_3.ranks for r in into_3.ranks if into_3.sent(s, r)}
    assert sent == {(0, 2): [3], (1, 0): [1], (2, 3): [1], (3, 1): [3]}, "every rank sends one slice and gets one"
    retired = regroup(LAYOUT, TWO_MERGES, ReleasedWorkers.retire)
    into_0, into_3 = transfers(LAYOUT, retired.layout_after(LAYOUT), retired)
    assert (into_0.ranks, into_3.ranks) == ((0, 1), (0, 1, 3)), "one rank of trainer 1 is enough"


def test_random_merges_keep_all_workers_and_send_every_member_to_every_rank() -> None:
    rng = random.Random(0)
    for _ in range(300):
        num_ranks, num_trainers = rng.randint(1, 6), rng.randint(1, 7)
        layout = Layout.one_rank_per_worker(
            {
                number: tuple(rng.randrange(num_ranks) for _ in range(rng.randint(1, 4)))
                for number in range(num_trainers)
            }
        )
        settings = MergeSettings(
            policy=rng.choice(list(MergePolicy)), width=rng.randint(2, 5), simultaneous=rng.randint(1, 3),
            min_trainers=rng.randint(1, 3), weights=rng.choice(list(MergeWeights)),
        )  # fmt: skip
        candidates = {
            trainer: TrainerView(rng.choice([1.0, 2.0, math.inf]), rng.uniform(1, 9), rng.random() < 0.8)
            for trainer in layout.trainers
        }
        merges = choose_merges(settings, candidates)
        released_workers = rng.choice(list(ReleasedWorkers))
        left = set(layout.trainers) - {ended for one in merges for ended in one.ended}
        requests = {trainer: candidates[trainer].bounded for trainer in left}
        regrouping = regroup(layout, merges, released_workers, requests, dict.fromkeys(left, 99))
        after = regrouping.layout_after(layout)
        assert set(after.trainers) == left
        assert not merges or len(left) >= settings.min_trainers
        assert all(math.isclose(sum(one.shares.values()), 1) for one in merges)
        assert all(candidates[one.survivor].is_finite for one in merges)
        before_loads, after_loads = (
            Counter(ranks for workers in some.workers.values() for ranks in workers) for some in (layout, after)
        )
        if released_workers is not ReleasedWorkers.retire:
            assert before_loads == after_loads, "nobody moves and nobody is lost"
        for transfer in transfers(layout, after, regrouping):
            assert set(after.ranks(transfer.trainer)) <= set(transfer.ranks)
            for receiver in transfer.ranks:
                held = [member for member, holders in transfer.holders.items() if receiver in holders]
                got = [member for sender in transfer.ranks for member in transfer.sent(sender, receiver)]
                assert sorted(held + got) == sorted(transfer.shares), "every member's slice exactly once"
                for sender in transfer.ranks:
                    assert all(sender in transfer.holders[member] for member in transfer.sent(sender, receiver))


def test_the_trainers_with_the_largest_losses_merge_into_the_one_with_the_smallest() -> None:
    def pool(**losses: list[float | None]) -> dict[int, TrainerView]:
        columns = [dict(zip(losses, values, strict=True)) for values in zip(*losses.values(), strict=True)]
        return {trainer: TrainerView(request=8.0, bounded=8.0, **row) for trainer, row in enumerate(columns)}

    by_loss = MergeSettings(policy=MergePolicy.worst_loss_with_best, width=3)
    trained = pool(train_loss=[2.0, 5.0, 1.0, 4.0])
    assert chosen(by_loss, trained) == [(2, pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}))]
    evaluated = pool(train_loss=[2.0, 5.0, 1.0, 4.0], validation_loss=[3.0, 2.0, 9.0, 7.0])
    assert chosen(by_loss, evaluated)[0] == (1, pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}))
    partly = pool(train_loss=[2.0, 5.0, 1.0, 4.0], validation_loss=[3.0, None, 9.0, 7.0])
    assert chosen(by_loss, partly) == chosen(by_loss, trained), "losses of two kinds are not compared"
    lost = pool(train_loss=[2.0, math.nan, math.inf, None])
    assert chosen(MergeSettings(policy=MergePolicy.worst_loss_with_best), lost) == [(0, {0: 0.5, 3: 0.5})]
    equal = pool(train_loss=[2.0, 2.0, 2.0])
    assert chosen(by_loss, equal)[0][0] == 0, "of equal ones the lower id is the better"


def test_trainers_that_are_not_finite_end_before_others_whatever_the_policy() -> None:
    pool = {trainer: TrainerView(8.0, 8.0, train_loss=float(trainer)) for trainer in range(4)}
    pool[0] = TrainerView(8.0, 8.0, is_finite=False, train_loss=-1.0)
    for policy in (MergePolicy.worst_with_worst, MergePolicy.best_with_worst, MergePolicy.worst_loss_with_best):
        ((survivor, shares),) = chosen(MergeSettings(policy=policy), pool)
        assert (survivor, shares) == (1, {0: 0.0, 1: 1.0}), policy
