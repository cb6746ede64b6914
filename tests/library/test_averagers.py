"""Averagers on real ranks: the same bits on all of them, near the exact sum, and nothing lost to error feedback."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import on_ranks

AVERAGERS: dict[str, Averager] = {
    "fp32": FullPrecision(),
    "bf16": Quantized(BFloat16()),
    "int8": Quantized(WholeNumbers(8)),
    "int4": Quantized(WholeNumbers(4)),
    "sparse": Sparse(0.1, keeps_residual=False),
}
ERRORS = {"fp32": 1e-6, "bf16": 2**-7, "int8": 0.01, "int4": 0.2, "sparse": 1.0}
"""Of the sum, over the largest of its elements: both roundings of every rank's part."""


def payload(rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + length)
    return torch.cat([torch.randn(length, generator=generator), torch.tensor([0.5, 1.0 + rank])])


def sum_up(runtime: Runtime, name: str, length: int) -> dict[str, Any]:
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    mine = payload(runtime.rank, length)
    return {"total": AVERAGERS[name].all_reduce(mine, 2, group, None).clone()}


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("name", AVERAGERS)
def test_all_ranks_have_the_same_bits_and_they_are_near_the_sum(name: str, num_ranks: int) -> None:
    for length in (3, 128, 5000):  # fewer blocks than ranks, and slices that are not even
        results = [found["total"] for found in on_ranks(sum_up, num_ranks, name, length)]
        for other in results[1:]:
            assert torch.equal(results[0], other)
        exact = sum(payload(rank, length).double() for rank in range(num_ranks))
        assert isinstance(exact, torch.Tensor)
        error = (results[0].double() - exact).abs().max() / exact[:-2].abs().max()
        assert error <= ERRORS[name] * num_ranks
        assert results[0][-2:].tolist() == [0.5 * num_ranks, num_ranks * (num_ranks + 1) / 2], "the exact part"


def feed_back(runtime: Runtime, name: str) -> dict[str, Any]:
    codecs = {"int4": WholeNumbers(4), "int8": WholeNumbers(8)}
    averager = Quantized(codecs[name], keeps_residual=True) if name in codecs else Sparse(0.05, decay=1.0)
    group = group_of(None, torch.device("cpu"), 60)
    assert group is not None
    residual = torch.zeros(5000)
    sums, sent = torch.zeros(5000), torch.zeros(5000)
    for number in range(4):
        mine = payload(runtime.rank + 10 * number, 5000)
        sums += mine[:-2]
        sent += averager.all_reduce(mine, 2, group, residual)[:-2]
    dist.all_reduce(sums)
    kept = residual.clone()
    dist.all_reduce(kept)
    return {"sums": sums, "sent": sent, "kept": kept}


@pytest.mark.parametrize(("name", "tolerance"), [("sparse", 1e-4), ("int8", 0.3), ("int4", 5.0)])
def test_what_was_sent_and_what_is_kept_is_what_there_was(name: str, tolerance: float) -> None:
    """Sparse sums are sent as they are; whole numbers are rounded a second time, in the sum, which nobody keeps."""
    (found, _) = on_ranks(feed_back, 2, name)
    torch.testing.assert_close(found["sent"] + found["kept"], found["sums"], rtol=0, atol=tolerance)
    assert found["kept"].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "share"), [("bf16", 0.5), ("int8", 0.26), ("int4", 0.135), ("sparse", 0.08)]
)  # fmt: skip
def test_bytes_are_what_the_format_takes(name: str, share: float) -> None:
    exact = AVERAGERS["fp32"].bytes_per_rank(1_000_001, 1, 2)
    assert exact == 4_000_004
    assert AVERAGERS[name].bytes_per_rank(1_000_001, 1, 2) <= share * exact + 1000
    assert Sparse().bytes_per_rank(1_000_001, 1, 2) <= 0.02 * exact


def test_settings_are_what_ranks_compare() -> None:
    assert str(AVERAGERS["int4"]) == "Quantized(codec=WholeNumbers(bits=4), keeps_residual=False)"
    assert str(FullPrecision(torch.float64)) == str(FullPrecision())
