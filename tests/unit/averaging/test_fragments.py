"""Which tensors make a fragment, and when fragments are averaged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adloco_dist.averaging.fragments import fragments_of
from adloco_dist.averaging.schedule import Action, Event, round_events
from adloco_dist.vectors import VectorLayout


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=30), data=st.data())
def test_fragments_are_a_balanced_partition(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    layout = VectorLayout.of((str(number), torch.empty(size)) for number, size in enumerate(sizes))
    fragments = fragments_of(layout, count)
    assert sorted(tensor for fragment in fragments for tensor in fragment.tensors) == list(range(len(sizes)))
    covered = torch.zeros(layout.num_elements)
    for fragment in fragments:
        for one in fragment.slices:
            covered[one] += 1
    assert (covered == 1).all()
    loads = [fragment.num_elements for fragment in fragments]
    assert max(loads) <= layout.num_elements / count + max(-(-size // 32) * 32 for size in sizes)
    vector = torch.arange(layout.num_elements)
    longest = data.draw(st.integers(1, layout.num_elements))
    for runs in ([fragment.runs(longest) for fragment in fragments],
                 [fragment.tensor_runs(layout, longest) for fragment in fragments]):  # fmt: skip
        seen = []
        for fragment, of_fragment in zip(fragments, runs, strict=True):
            end = 0
            for run in of_fragment:
                assert (run.packed.start, run.packed.stop) == (end, end + run.where.stop - run.where.start)
                end = run.packed.stop
                seen.append(vector[run.where])
            assert end == fragment.num_elements
        assert sorted(torch.cat(seen).tolist()) == vector.tolist()


def test_more_fragments_than_tensors_are_refused() -> None:
    layout = VectorLayout.of([("one", torch.empty(3)), ("two", torch.empty(3))])
    with pytest.raises(ValueError, match="fragments=3: must be <= the 2 tensors that are trained"):
        fragments_of(layout, 3)


@given(updates=st.integers(1, 60), data=st.data())
def test_every_fragment_meets_once_a_round_and_never_two_are_under_way(updates: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, updates))
    delay = data.draw(st.integers(0, updates // fragments - 1))
    is_mixed = delay > 0 or data.draw(st.booleans())
    started: list[int] = []
    under_way: int | None = None
    for _ in range(2):
        for event in round_events(updates, fragments, delay, is_mixed=is_mixed):
            if event.action is Action.mix:
                assert under_way in (event.fragment, None)  # None: nothing has been started before the first round
                under_way = None
            else:
                assert under_way is None
                started.append(event.fragment)
                under_way = event.fragment if is_mixed else None
    assert sorted(started) == sorted([*range(fragments)] * 2)
    assert started[fragments:] == started[:fragments]


def test_the_events_of_a_round() -> None:
    assert round_events(25) == (Event(25, Action.end, 0),), "plain DiLoCo"
    assert round_events(25, updates=7) == (Event(7, Action.end, 0),), "a last round that is shorter"
    times = [(event.update, event.action.name, event.fragment) for event in round_events(12, 3, 2)]
    assert times == [(2, "mix", 0), (4, "start", 1), (6, "mix", 1), (8, "start", 2), (10, "mix", 2), (12, "end", 0)]
    assert [event.update for event in round_events(12, 3, 2, updates=5)] == [2, 4, 5]
    at_once = [(event.update, event.action.name, event.fragment) for event in round_events(6, 2, 0, is_mixed=True)]
    assert at_once == [(0, "mix", 0), (3, "start", 1), (3, "mix", 1), (6, "end", 0)]
    assert round_events(12, 3, updates=4)[-2:] == (Event(4, Action.start, 1), Event(4, Action.end, 0))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((10, 0, 0), "fragments=0: must be from 1 to the 10 updates of a round"),
        ((10, 11, 0), "fragments=11: must be from 1 to the 10 updates of a round"),
        ((10, 2, 5), "delay_updates=5: must be from 0 to below the 5 updates between two averages"),
        ((10, 2, -1), "delay_updates=-1: must be from 0 to below the 5 updates between two averages"),
    ],
)
def test_times_that_do_not_fit_are_refused(arguments: tuple[int, int, int], line: str) -> None:
    with pytest.raises(ValueError) as raised:
        round_events(*arguments)
    assert str(raised.value) == line
