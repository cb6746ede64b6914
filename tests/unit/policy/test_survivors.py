"""What ranks that are left decide, with any of them lost at any place: plain values."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from adloco_dist.config import Placement, Settings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import Layout, fitted, place
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.survivors import Recovery, Remains, Share, without_lost

GENERATION = 3


def planned(layout: Layout) -> RoundPlan:
    return plan_round(Settings(), PlanInputs(layout), None, PoolReport())


@st.composite
def losses(draw: st.DrawFn) -> tuple[RoundPlan, list[int], list[Remains]]:
    """A plan, the ranks of before that are left, in any order, and what each of the ranks that are there now has."""
    num_ranks = draw(st.integers(1, 6))
    layout = place(draw(st.integers(1, 4)), draw(st.integers(1, 4)), [0] * num_ranks, Placement.pack)
    plan = planned(layout)
    left = draw(st.lists(st.integers(0, num_ranks - 1), unique=True, min_size=1))
    remains = []
    for rank in left:
        # Of an average that some have completed, and others have not.
        shares = {
            trainer: Share(5 + (done := draw(st.integers(0, 1))), [done, 0], workers)
            for trainer, workers in layout.placed_on(rank).items()
        }
        remains.append(Remains(GENERATION, plan.round, draw(st.integers(0, 3)), shares))
    older = Remains(GENERATION - 1, 7, 3, {0: Share(9, [9, 9], [0])})
    new = draw(st.lists(st.sampled_from([Remains(), older]), max_size=3))
    return plan, left, [*remains, *new]


@given(losses())
def test_all_that_is_left_is_kept_and_all_that_is_lost_begins_again(
    case: tuple[RoundPlan, list[int], list[Remains]],
) -> None:
    plan, left, remains = case
    recovery = Recovery.of(decode(list[Remains], encode(remains)), ranks_per_seat=1)
    if not any(one.trainers for one in remains[: len(left)]):
        return
    assert recovery is not None
    assert set(recovery.remains) == {rank for rank in range(len(left)) if remains[rank].trainers}, "no older ones"
    assert recovery.remains[recovery.furthest].place == max(one.place for one in recovery.remains.values())
    survivors = {trainer for old in left for trainer in plan.layout.placed_on(old)}
    assert set(recovery.trainers(plan)) == survivors
    nodes = list(range(len(remains)))
    layout = recovery.layout(plan, nodes, Placement.pack)
    held = recovery.held(plan)
    for trainer in recovery.trainers(plan):
        assert layout.num_workers(trainer) == held.num_workers(trainer) == plan.layout.num_workers(trainer)
        (leader,) = recovery.leaders(trainer)
        followed = remains[leader].trainers[trainer]
        assert followed.steps == max(remains[rank].trainers[trainer].steps for rank in recovery.holders(trainer))
        behind = {follower for _, follower in recovery.behind(trainer)}
        for rank in recovery.holders(trainer):
            assert (remains[rank].trainers[trainer] != followed) >= (rank in behind)
            assert rank in behind or remains[rank].trainers[trainer].steps == followed.steps
        for worker, (seat,) in enumerate(held.workers[trainer]):
            was_on = plan.layout.workers[trainer][worker][0]
            if worker in recovery.lost(plan, trainer):
                assert was_on not in left
                assert seat == leader
            else:
                assert left[seat] == was_on
    load = [sum(map(len, layout.placed_on(seat).values())) for seat in nodes]
    if sum(load) >= len(nodes):
        assert min(load) >= 1, "nobody is idle where there is work"


@given(losses(), st.booleans())
def test_the_plan_that_is_left_is_of_what_is_left(
    case: tuple[RoundPlan, list[int], list[Remains]], are_lost_for_good: bool
) -> None:
    plan, _, remains = case
    recovery = Recovery.of(remains, ranks_per_seat=1)
    if recovery is None or recovery.remains[recovery.furthest].generation != GENERATION:
        return
    held = recovery.held(plan)
    leaving = {trainer: recovery.lost(plan, trainer) for trainer in held.trainers} if are_lost_for_good else {}
    left = without_lost(plan, held, leaving)
    assert set(left.batches) == set(left.layout.workers) == set(recovery.trainers(plan))
    following = plan_round(Settings(), PlanInputs(plan.layout), left, None)
    lost = {trainer: len(left.leaving.get(trainer, ())) for trainer in held.trainers}
    for trainer in held.trainers:
        assert following.layout.num_workers(trainer) == plan.layout.num_workers(trainer) - lost[trainer] >= 1
    assert not following.leaving


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    num_ranks=st.integers(1, 8),
    data=st.data(),
)
def test_as_many_workers_as_ranks_stay_where_their_state_is(
    counts: list[int], num_ranks: int, data: st.DataObject
) -> None:
    ranks = {trainer: data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=count, max_size=count))
             for trainer, count in enumerate(counts)}  # fmt: skip
    layout, origins = fitted(
        Layout.one_rank_per_worker(ranks), num_ranks, lambda trainer, worker: [ranks[trainer][worker]]
    )
    load = _load(layout, num_ranks)
    assert sum(load) == max(num_ranks, len(counts))
    assert max(load) - min(load) <= 1
    for trainer in layout.trainers:
        kept = [origin for origin in origins[trainer] if origin is not None]
        assert kept == list(range(len(kept)))
        assert len(kept) == min(counts[trainer], len(origins[trainer]))
    if all(count <= 1 for count in _load(Layout.one_rank_per_worker(ranks), num_ranks)):
        for trainer, of_workers in origins.items():
            for (rank,), origin in zip(layout.workers[trainer], of_workers, strict=True):
                assert origin is None or rank == ranks[trainer][origin], "it stays"


def _load(layout: Layout, num_ranks: int) -> list[int]:
    placed: list[Mapping[int, list[int]]] = [layout.placed_on(rank) for rank in range(num_ranks)]
    return [sum(map(len, workers.values())) for workers in placed]
