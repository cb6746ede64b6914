"""Codecs: what comes back is within the stated bound of what was sent, whatever that was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adloco_dist.averaging.codecs import BLOCK, BFloat16, Codec, Signs, WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import CHUNK, Sparse

MAGNITUDES = (0.0, 1e-45, 1e-41, 1e-38, 1e-30, 1e-3, 1.0, 3e4, 1e30, 3.3e38)


def restored(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    averager, total = Quantized(codec), torch.zeros_like(values)
    averager.add(averager.encode(values), total)
    return total


def bounds(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """The greatest error that each value may have."""
    if isinstance(codec, BFloat16):
        return values.abs() * 2**-8 + 1e-40
    assert isinstance(codec, WholeNumbers)
    blocks = torch.cat([values, values.new_zeros(-len(values) % BLOCK)]).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: len(values)].double()
    return largest * (1 + 2**-7) / (2 * codec.levels) * (1 + 1e-6) + 1e-40


@pytest.mark.parametrize("codec", [BFloat16(), WholeNumbers(8), WholeNumbers(4)])
@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 3 * BLOCK), magnitude=st.sampled_from(MAGNITUDES), seed=st.integers(0, 2**31),
    outlier=st.sampled_from([None, *MAGNITUDES]),
)  # fmt: skip
def test_what_comes_back_is_within_the_bound(
    codec: Codec, length: int, magnitude: float, seed: int, outlier: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(length, generator=generator) * 2 - 1) * magnitude
    if outlier is not None:
        values[seed % length] = -outlier
    found = restored(codec, values)
    if magnitude > 1e38 or (outlier or 0) > 1e38:  # rounded up, the largest of bfloat16's numbers is none
        found = found.nan_to_num(posinf=3.4e38, neginf=-3.4e38)
    assert ((found.double() - values.double()).abs() <= bounds(codec, values)).all()
    assert (found[values == 0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 3 * BLOCK), magnitude=st.sampled_from(MAGNITUDES[5:8]), seed=st.integers(0, 2**31))
def test_signs_come_back_with_the_mean_magnitude_of_their_block(length: int, magnitude: float, seed: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * magnitude
    found = restored(Signs(), values)
    assert torch.equal(found.sign(), values.sign())
    for found_block, block in zip(found.split(BLOCK), values.split(BLOCK), strict=True):
        missing = len(block) / BLOCK  # zeros fill the last block up
        torch.testing.assert_close(
            found_block.abs(), (block.abs().mean() * missing).expand_as(block), rtol=2**-8, atol=0
        )
        assert (found_block - block).norm() < block.norm(), "what is left is less than what there was"
    assert not restored(Signs(), torch.zeros(length)).any()


@pytest.mark.parametrize("codec", [BFloat16(), WholeNumbers(8), WholeNumbers(4), Signs()])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_stays_so(codec: Codec, value: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = value
    found = restored(codec, values)
    assert not found[BLOCK + 5].isfinite()
    assert found[:BLOCK].isfinite().all() and found[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize(
    ("codec", "bits"), [(BFloat16(), 16), (WholeNumbers(8), 8.125), (WholeNumbers(4), 4.125), (Signs(), 1.125)]
)
def test_codes_have_the_bits_that_are_stated(codec: Codec, bits: float) -> None:
    assert codec.block_bytes * 8 == bits * BLOCK


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits=3: must be 4 or 8"):
        WholeNumbers(3)


@pytest.mark.parametrize("fraction", [64 / CHUNK, 1 / CHUNK, 0.3, 1.0])
@pytest.mark.parametrize("length", [5, CHUNK, 3 * CHUNK - 7])
def test_sparse_sends_the_largest_with_their_signs(fraction: float, length: int) -> None:
    sparse = Sparse(fraction)
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    message = sparse.encode(values)
    assert message.shape == (-(-length // CHUNK), sparse.chunk_bytes)
    places, sent = sparse.decode(message)
    padded = torch.cat([values, values.new_zeros(-length % CHUNK)]).view(-1, CHUNK)
    for row, (chosen, decoded) in enumerate(
        zip(places - CHUNK * torch.arange(len(places))[:, None], sent, strict=True)
    ):
        assert len(chosen.unique()) == sparse.num_sent
        rest = padded[row].abs().clone()
        rest[chosen] = 0
        assert rest.max() <= padded[row][chosen].abs().min()
        exact = padded[row][chosen]
        assert (decoded.sign() * exact.sign() >= 0).all()
        assert len(decoded.abs().unique()) <= 2
        assert (decoded - exact).norm() <= exact.norm()


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_a_fraction_outside_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        Sparse(fraction)
