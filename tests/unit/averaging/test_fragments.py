"""Which tensors make a fragment, and when fragments are averaged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adloco_dist.averaging.fragments import fragments_of
from adloco_dist.averaging.schedule import FragmentSchedule
from adloco_dist.vectors import VectorLayout


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
    packed = torch.empty(max(loads))
    vector = torch.arange(layout.num_elements)
    seen = [part for fragment in fragments for part, _ in fragment.parts(vector, packed=packed)]
    assert sorted(torch.cat(seen).tolist()) == vector.tolist()


def test_more_fragments_than_tensors_are_refused() -> None:
    layout = VectorLayout.of([("one", torch.empty(3)), ("two", torch.empty(3))])
    with pytest.raises(ValueError, match="fragments=3: must be <= the 2 tensors that are trained"):
        fragments_of(layout, 3)


@given(updates=st.integers(1, 60), data=st.data())
def test_every_fragment_meets_once_a_round_and_never_two_are_under_way(updates: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, updates))
    delay = data.draw(st.integers(0, updates // fragments - 1))
    schedule = FragmentSchedule(updates, fragments, delay)
    started: list[int] = []
    under_way: int | None = None
    for _ in range(2):
        for update in schedule.boundaries(updates):
            for fragment in schedule.mixed(update):
                assert under_way in (fragment, None)  # None: nothing has been started before the first round
                under_way = None
            for fragment in (*schedule.started(update), *((0,) if update == updates else ())):
                assert under_way is None
                started.append(fragment)
                under_way = fragment if delay else None
    assert sorted(started) == sorted([*range(fragments)] * 2)
    assert started[fragments:] == started[:fragments]


def test_plain_diloco_has_one_boundary() -> None:
    assert FragmentSchedule(25).boundaries(25) == [25]
    assert FragmentSchedule(25).boundaries(7) == [7], "a last round that is shorter"
    assert FragmentSchedule(12, 3, 2).boundaries(12) == [2, 4, 6, 8, 10, 12]
    assert FragmentSchedule(12, 3, 2).boundaries(5) == [2, 4, 5]


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
        FragmentSchedule(*arguments)
    assert str(raised.value) == line
