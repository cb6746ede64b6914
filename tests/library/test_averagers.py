"""Averagers on real ranks: the same bits on all of them, near the exact sum, and nothing lost to error feedback."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.codecs import BFloat16, Signs, WholeNumbers
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.inside_first import InsideFirst
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import on_ranks

IN_FEW_BITS: dict[str, Quantized | Sparse] = {
    "bf16": Quantized(BFloat16()),
    "int8": Quantized(WholeNumbers(8)),
    "int4": Quantized(WholeNumbers(4)),
    "signs": Quantized(Signs()),
    "sparse": Sparse(0.1, keeps_residual=False),
}
WITH_RESIDUAL: dict[str, Quantized | Sparse] = {
    "int8": Quantized(WholeNumbers(8), keeps_residual=True),
    "int4": Quantized(WholeNumbers(4), keeps_residual=True),
    "signs": Quantized(Signs(), keeps_residual=True),
    "sparse": Sparse(0.05, decay=1.0),
}
AVERAGERS: dict[str, Averager] = {"fp32": FullPrecision(), **IN_FEW_BITS}
ERRORS = {"fp32": 1e-6, "bf16": 2**-7, "int8": 0.01, "int4": 0.2, "signs": 1.0, "sparse": 1.0}
"""Of the sum, over the largest of its elements: both roundings of every rank's part."""


def payload(rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + length)
    return torch.cat([torch.randn(length, generator=generator), torch.tensor([0.5, 1.0 + rank])])


LENGTHS = (3, 128, 5000, 20_000)
"""Fewer blocks than ranks, and slices that are not even."""


def sum_up(runtime: Runtime) -> dict[tuple[str, int], torch.Tensor]:
    """The sums of every averager, by name and length."""
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    return {
        (name, length): averager.exchange(payload(runtime.rank, length), 2, group, None)().clone()
        for name, averager in AVERAGERS.items()
        for length in LENGTHS
    }


@cache
def sums_of(num_ranks: int) -> list[dict[tuple[str, int], torch.Tensor]]:
    return on_ranks(sum_up, num_ranks)


@pytest.mark.parametrize("num_ranks", range(2, 10))
@pytest.mark.parametrize("name", AVERAGERS)
def test_all_ranks_have_the_same_bits_and_they_are_near_the_sum(name: str, num_ranks: int) -> None:
    for length in LENGTHS:
        results = [sums[name, length] for sums in sums_of(num_ranks)]
        for other in results[1:]:
            assert torch.equal(results[0], other)
        exact = sum(payload(rank, length).double() for rank in range(num_ranks))
        assert isinstance(exact, torch.Tensor)
        error = (results[0].double() - exact).abs().max() / exact[:-2].abs().max()
        assert error <= ERRORS[name] * num_ranks
        assert results[0][-2:].tolist() == [0.5 * num_ranks, num_ranks * (num_ranks + 1) / 2], "the exact part"


def feed_back(runtime: Runtime, name: str) -> dict[str, Any]:
    averager = WITH_RESIDUAL[name]
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    residual = torch.zeros(5000)
    sums, sent = torch.zeros(5000), torch.zeros(5000)
    for number in range(4):
        mine = payload(runtime.rank + 10 * number, 5000)
        sums += mine[:-2]
        sent += averager.exchange(mine, 2, group, residual)()[:-2]
    dist.all_reduce(sums)
    kept = residual.clone()
    dist.all_reduce(kept)
    return {"sums": sums, "sent": sent, "kept": kept}


def sum_inside_first(runtime: Runtime, nodes: tuple[int, ...], length: int) -> dict[str, Any]:
    """By averager: the sum, and what is owed after it."""
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    sums: dict[str, Any] = {}
    for name in ("bf16", "int4", "sparse"):
        residual = torch.zeros(length) if name == "sparse" else None
        total = InsideFirst(IN_FEW_BITS[name], nodes).exchange(payload(runtime.rank, length), 2, group, residual)()
        sums[name] = (total.clone(), residual)
    return sums


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1), (0, 1, 0, 1, 0), (0, 0, 1, 2, 2)])
def test_sums_inside_of_nodes_first_are_near_the_sum_in_the_same_bits(nodes: tuple[int, ...]) -> None:
    length, count = 1001, len(nodes)
    ranks = on_ranks(sum_inside_first, count, nodes, length)
    exact = torch.stack([payload(rank, length) for rank in range(count)]).sum(0)
    for name, (total, _) in ranks[0].items():
        assert all(torch.equal(rank[name][0], total) for rank in ranks), name
        torch.testing.assert_close(total[-2:], exact[-2:])
        if name == "sparse":  # what was sent and what is kept, of all ranks, is what there was
            kept = torch.stack([rank[name][1] for rank in ranks]).sum(0)
            torch.testing.assert_close(total[:-2] + kept, exact[:-2], rtol=0, atol=1e-4)
        else:
            torch.testing.assert_close(total, exact, rtol=0, atol=ERRORS[name] * float(exact.abs().max()), msg=name)


def test_several_ranks_of_a_node_send_no_more_to_others_than_one_would() -> None:
    flat = IN_FEW_BITS["int4"]
    inside = InsideFirst(flat, (0,) * 8 + (1,) * 8)
    alone = flat.bytes_per_rank(8_000_001, 1, (0, 8))
    between = inside.bytes_per_rank(8_000_001, 1, range(16)) - 4 * 1_000_000 * (7 + 7)
    assert 8 * between == pytest.approx(alone, rel=0.01), "each of eight ranks sends an eighth"


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_was_sent_and_what_is_kept_is_what_there_was(name: str, num_ranks: int) -> None:
    """Of more than two ranks sums are rounded, too: the owners of slices keep what that leaves."""
    (found, *_) = on_ranks(feed_back, num_ranks, name)
    torch.testing.assert_close(found["sent"] + found["kept"], found["sums"], rtol=0, atol=1e-4)
    assert found["kept"].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "share"), [("bf16", 0.5), ("int8", 0.26), ("int4", 0.135), ("signs", 0.036), ("sparse", 0.08)]
)  # fmt: skip
def test_bytes_are_what_the_format_takes(name: str, share: float) -> None:
    exact = AVERAGERS["fp32"].bytes_per_rank(1_000_001, 1, (0, 1))
    assert exact == 4_000_004
    assert AVERAGERS[name].bytes_per_rank(1_000_001, 1, (0, 1)) <= share * exact + 1000
    assert Sparse().bytes_per_rank(1_000_001, 1, (0, 1)) <= 0.02 * exact


@pytest.mark.parametrize("name", IN_FEW_BITS)
def test_bytes_do_not_grow_with_ranks(name: str) -> None:
    elements = 1 << 24
    two, many = (AVERAGERS[name].bytes_per_rank(elements, 0, range(ranks)) for ranks in (2, 64))
    assert many == pytest.approx(2 * 63 / 64 * two, rel=0.01)
    assert Sparse(1 / 16).bytes_per_rank(elements, 0, range(16)) <= 0.25 * elements


def test_settings_are_what_ranks_compare() -> None:
    assert str(AVERAGERS["int4"]) == "Quantized(codec=WholeNumbers(bits=4), keeps_residual=False)"
    assert str(FullPrecision(torch.float64)) == str(FullPrecision())


def owe(runtime: Runtime, nodes: tuple[int, ...]) -> dict[str, Any]:
    """By averager: what a rank owes after a sum, and after one of no worker at all, and what that one came to."""
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    found: dict[str, Any] = {}
    for name, between in WITH_RESIDUAL.items():
        averager, residual = InsideFirst(between, nodes), torch.zeros(5000)
        averager.exchange(payload(runtime.rank, 5000), 2, group, residual)()
        owed = residual.clone()
        total = averager.exchange(torch.zeros(5002), 2, group, residual)()
        found[name] = (owed, residual, total[-1])
    return found


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1), (0, 0, 1)])
def test_a_sum_of_no_worker_leaves_what_is_owed(nodes: tuple[int, ...]) -> None:
    """Such a sum is dropped: what were sent with it would be lost."""
    ranks = on_ranks(owe, len(nodes), nodes)
    for name in WITH_RESIDUAL:
        assert sum(float(rank[name][0].abs().sum()) for rank in ranks) > 0, "something is owed"
        for owed, kept, count in (rank[name] for rank in ranks):
            assert count == 0
            torch.testing.assert_close(kept, owed, rtol=0, atol=1e-6)


def move(runtime: Runtime, nodes: tuple[int, ...]) -> dict[str, Any]:
    """What is owed after sums without nodes, and what becomes of it when there are nodes, in three sums more."""
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    between, residual = WITH_RESIDUAL["sparse"], torch.zeros(5000)
    between.exchange(payload(runtime.rank, 5000), 2, group, residual)()
    owed, sent = residual.clone(), torch.zeros(5000)
    for _ in range(3):
        mine = torch.cat([torch.zeros(5000), torch.ones(2)])
        sent += InsideFirst(between, nodes).exchange(mine, 2, group, residual)()[:-2]
    return {"owed": owed, "kept": residual, "sent": sent}


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 0, 1, 1)])
def test_what_is_owed_is_sent_from_other_places_too(nodes: tuple[int, ...]) -> None:
    """With other nodes a rank sums another slice: what it owes of all the rest goes to who sums that now."""
    ranks = on_ranks(move, len(nodes), nodes)
    owed, kept = (torch.stack([rank[name] for rank in ranks]).sum(0) for name in ("owed", "kept"))
    torch.testing.assert_close(ranks[0]["sent"] + kept, owed, rtol=0, atol=1e-4)
    for place, rank in enumerate(ranks[: nodes.count(0)]):
        own = slice(2500 * place, 2500 * (place + 1))
        assert rank["kept"].count_nonzero() == rank["kept"][own].count_nonzero(), "of its own slice alone"


def sum_nothing(runtime: Runtime, length: int) -> dict[str, Any]:
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    found: dict[str, Any] = {}
    averagers = {**AVERAGERS, **{f"{name} with residual": one for name, one in WITH_RESIDUAL.items()}}
    for name, averager in averagers.items():
        residual = torch.zeros(length) if averager.keeps_residual else None
        found[name] = averager.exchange(payload(runtime.rank, length), 2, group, residual)().clone()
    return found


@pytest.mark.stranger
@pytest.mark.parametrize(("num_ranks", "length"), [(2, 0), (3, 0), (3, 1)])
def test_a_rank_that_has_nothing_of_a_fragment_sums_what_must_be_exact(num_ranks: int, length: int) -> None:
    """As ranks whose part of a short tensor is empty."""
    ranks = on_ranks(sum_nothing, num_ranks, length)
    exact = [0.5 * num_ranks, num_ranks * (num_ranks + 1) / 2]
    for name, total in ranks[0].items():
        assert total[-2:].tolist() == exact, name
        assert all(torch.equal(rank[name], total) for rank in ranks)
