"""How many groups a rank is in, and what is said and kept free for them."""

import pytest

from adloco_dist.averaging.group import _said
from adloco_dist.cluster.groups import COMMUNICATOR_BYTES, Groups
from adloco_dist.config import Backend


@pytest.mark.parametrize(
    ("num_formed", "num_trainers", "maximum", "to_come"),
    [
        (1, 4, 8, 2),  # three trainers after the first merge, and a rank may be in the group of each
        (0, 4, 8, 3),
        (1, 2, 8, 0),
        (1, 1, 8, 0),
        (4, 4, 8, 0),
        (2, 100, 8, 6),
        (2, 100, 2, 0),
    ],
)
def test_groups_that_merges_may_bring(num_formed: int, num_trainers: int, maximum: int, to_come: int) -> None:
    groups = Groups(Backend.nccl, 60, maximum)
    groups._groups = {(0, other): None for other in range(1, 1 + num_formed)}
    assert groups.bytes_to_come(0, num_trainers) == to_come * COMMUNICATOR_BYTES


def test_memory_is_kept_free_for_them_with_nccl_alone() -> None:
    assert Groups(Backend.nccl, 60).bytes_to_come(0, num_trainers=3) == 2 * COMMUNICATOR_BYTES
    assert Groups(Backend.nccl, 60, maximum=1).bytes_to_come(0, num_trainers=3) == COMMUNICATOR_BYTES
    assert Groups(Backend.gloo, 60, maximum=1).bytes_to_come(0, num_trainers=3) == 0


def test_more_groups_than_may_be_formed_at_one_time_are_reported() -> None:
    sets = [(0, 1), (0, 2), (0, 1, 2), (0, 1), (3,), (0,)]  # rank 0 is in three groups of more than one rank
    assert Groups(Backend.nccl, 60).crowding(sets) is None
    assert Groups(Backend.gloo, 60).crowding([(0, rank) for rank in range(1, 20)]) is None
    assert Groups(Backend.gloo, 60, maximum=3).crowding(sets) is None
    line = Groups(Backend.nccl, 60, maximum=2).crowding(sets)
    assert line and line.startswith("a rank is in 3 groups, of which 2 may be formed at one time: ")
    assert line.endswith("use fewer trainers per rank")
    lacking = Groups(Backend.nccl, 60, maximum=1).lacking([(0, 1), (0, 2)], 0)
    assert lacking and "a rank may be in 2 groups for that, of which 1 may be formed; use fewer trainers" in lacking
    assert Groups(Backend.nccl, 60, maximum=2).lacking([(0, 1), (0, 2)], 0) is None
    line = Groups(Backend.nccl, 60).crowding([(0, rank) for rank in range(1, 11)])
    assert line and line.startswith("a rank is in 10 groups, of which 8 ")


def test_why_ranks_could_not_connect_is_what_nccl_says_last() -> None:
    place = (
        "NCCL error in: ProcessGroupNCCL.cpp:3135, invalid usage, NCCL version 2.28.9\nncclInvalidUsage: This usually"
    )
    assert _said(RuntimeError(f"{place}\nLast error:\nBootstrap : no socket interface found\n")) == (
        "Bootstrap : no socket interface found"
    )
    assert _said(RuntimeError(f"{place}\nLast error:\n\n")) == place.partition("\n")[0]
    assert _said(RuntimeError("Connection reset by peer\nat 10.0.0.1")) == "Connection reset by peer"
