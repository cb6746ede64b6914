"""Who merges with whom, and who works for whom afterwards: pure functions against hand-worked cases."""

import json
import math
import random
from collections import Counter

import pytest

from adloco_dist.config import MergePolicy, MergeSettings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge, TrainerView, choose_merge
from adloco_dist.round.combine import Transfer

FIVE = {
    0: TrainerView(30.0, 20.0),
    1: TrainerView(4.0, 4.0),
    2: TrainerView(math.inf, 12.0),
    3: TrainerView(4.0, 6.0),
    4: TrainerView(9.0, 10.0),
}


def chosen(settings: MergeSettings, candidates: dict[int, TrainerView]) -> tuple[int, dict[int, float]] | None:
    merge = choose_merge(settings, candidates)
    return (merge.survivor, dict(merge.shares)) if merge else None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MergeSettings(), (1, {1: 0.4, 3: 0.6})),
        (MergeSettings(width=3), (4, {1: 0.2, 3: 0.3, 4: 0.5})),
        (MergeSettings(policy=MergePolicy.best_with_worst), (2, {1: 0.25, 2: 0.75})),
        (MergeSettings(policy=MergePolicy.none), None),
        (MergeSettings(min_trainers=5), None),
        (MergeSettings(min_trainers=4, width=4), (1, {1: 0.4, 3: 0.6})),
        (MergeSettings(min_trainers=7), None),
    ],
)
def test_requests_before_bounds_choose_and_bounded_ones_weigh(
    settings: MergeSettings, expected: tuple[int, dict[int, float]] | None
) -> None:
    """Ties: the lower id is the weaker, and where equal ones are left the lower id survives."""
    found = chosen(settings, FIVE)
    assert found == (expected and (expected[0], pytest.approx(expected[1])))


def test_widths_beyond_the_pool() -> None:
    whole = choose_merge(MergeSettings(width=99), FIVE)
    assert whole
    assert (whole.survivor, whole.ended) == (2, [0, 1, 3, 4]), "all five into the one with the largest request"
    assert chosen(MergeSettings(width=99), {0: TrainerView(1, 1)}) is None
    assert chosen(MergeSettings(), {}) is None


def test_equal_requests_are_the_plain_mean() -> None:
    equal = {trainer: TrainerView(8.0, 8.0) for trainer in range(4)}
    assert chosen(MergeSettings(width=4), equal) == (0, dict.fromkeys(range(4), 0.25))


def test_a_trainer_that_is_not_finite_ends_without_a_share() -> None:
    broken = {**FIVE, 0: TrainerView(30.0, 20.0, is_finite=False)}
    assert chosen(MergeSettings(), broken) == (1, {0: 0.0, 1: 1.0})
    assert chosen(MergeSettings(policy=MergePolicy.best_with_worst), broken) == (2, {0: 0.0, 2: 1.0})
    more = {**broken, 2: TrainerView(math.inf, 12.0, is_finite=False)}
    assert chosen(MergeSettings(), more) == (1, {0: 0.0, 1: 1.0}), "two that are broken cannot save each other"
    all_broken = {trainer: TrainerView(2.0, 2.0, is_finite=False) for trainer in range(3)}
    assert chosen(MergeSettings(), all_broken) is None


LAYOUT = Layout.one_rank_per_worker({0: (0, 1), 1: (1, 2), 2: (3,), 3: (0, 3, 3)})
JOINED = Merge(3, {1: 0.5, 3: 0.5}, {1: TrainerView(2, 2), 3: TrainerView(2, 2)})


def test_workers_join_the_survivor_where_they_are() -> None:
    assert JOINED.origins(LAYOUT) == [(3, 0), (3, 1), (3, 2), (1, 0), (1, 1)], "its own first"
    after = JOINED.layout_after(LAYOUT)
    assert after == Layout.one_rank_per_worker({0: (0, 1), 2: (3,), 3: (0, 3, 3, 1, 2)})
    elsewhere = Layout.one_rank_per_worker({0: (5, 0), 1: (0, 0), 2: (2,), 3: (1, 4, 7)})
    assert JOINED.origins(elsewhere) == JOINED.origins(LAYOUT), "ranks play no part"
    assert decode(Merge, json.loads(json.dumps(encode(JOINED)))) == JOINED


def test_what_is_sent_for_a_merge() -> None:
    """Trainer 3's ranks 0, 3 and trainer 1's ranks 1, 2 together; a trainer without a share only receives."""
    joined = Transfer.of(JOINED.shares, LAYOUT, JOINED.layout_after(LAYOUT).ranks(3))
    assert (joined.ranks, joined.holders) == ((0, 1, 2, 3), {1: (1, 2), 3: (0, 3)})
    sent = {(s, r): joined.sent(s, r) for s in joined.ranks for r in joined.ranks if joined.sent(s, r)}
    assert sent == {(0, 2): [3], (1, 0): [1], (2, 3): [1], (3, 1): [3]}, "every rank sends one slice and gets one"
    left_out = Merge(0, {0: 1.0, 2: 0.0})
    alone = Transfer.of(left_out.shares, LAYOUT, left_out.layout_after(LAYOUT).ranks(0))
    assert (alone.shares, alone.holders, alone.ranks) == ({0: 1.0}, {0: (0, 1)}, (0, 1, 3))
    far = Transfer.of({0: 0.5, 1: 0.5}, LAYOUT, (3,))
    assert far.ranks == (0, 1, 3), "one rank of each is enough"


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
            policy=rng.choice(list(MergePolicy)), width=rng.randint(2, 5), min_trainers=rng.randint(1, 3)
        )
        candidates = {
            trainer: TrainerView(rng.choice([1.0, 2.0, math.inf]), rng.uniform(1, 9), rng.random() < 0.8)
            for trainer in layout.trainers
        }
        merge = choose_merge(settings, candidates)
        if merge is None:
            continue
        after = merge.layout_after(layout)
        assert set(after.trainers) == set(layout.trainers) - set(merge.ended)
        assert len(after.trainers) >= settings.min_trainers
        assert math.isclose(sum(merge.shares.values()), 1)
        assert candidates[merge.survivor].is_finite
        before_loads, after_loads = (
            Counter(ranks for workers in some.workers.values() for ranks in workers) for some in (layout, after)
        )
        assert before_loads == after_loads, "nobody moves and nobody is lost"
        transfer = Transfer.of(merge.shares, layout, after.ranks(merge.survivor))
        assert after.ranks(merge.survivor) == transfer.ranks, "every member's ranks are the survivor's"
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
    assert chosen(by_loss, trained) == (2, pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}))
    evaluated = pool(train_loss=[2.0, 5.0, 1.0, 4.0], validation_loss=[3.0, 2.0, 9.0, 7.0])
    assert chosen(by_loss, evaluated) == (1, pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}))
    partly = pool(train_loss=[2.0, 5.0, 1.0, 4.0], validation_loss=[3.0, None, 9.0, 7.0])
    assert chosen(by_loss, partly) == chosen(by_loss, trained), "losses of two kinds are not compared"
    lost = pool(train_loss=[2.0, math.nan, math.inf, None])
    assert chosen(MergeSettings(policy=MergePolicy.worst_loss_with_best), lost) == (0, {0: 0.5, 3: 0.5})
    equal = pool(train_loss=[2.0, 2.0, 2.0])
    assert chosen(by_loss, equal) == (0, dict.fromkeys(range(3), 1 / 3)), "of equal ones the lower id is the better"


def test_trainers_that_are_not_finite_end_before_others_whatever_the_policy() -> None:
    pool = {trainer: TrainerView(8.0, 8.0, train_loss=float(trainer)) for trainer in range(4)}
    pool[0] = TrainerView(8.0, 8.0, is_finite=False, train_loss=-1.0)
    for policy in (MergePolicy.worst_with_worst, MergePolicy.best_with_worst, MergePolicy.worst_loss_with_best):
        assert chosen(MergeSettings(policy=policy), pool) == (1, {0: 0.0, 1: 1.0}), policy
