"""Sketches: linear, the same everywhere, accurate, with signs that neither repeat nor stay."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from adloco_dist.noise.sketch import BLOCK_ELEMENTS, BUCKETS, Sketch
from helpers.support import sequence_gradients

CPU = torch.device("cpu")


def new_sketch(num_elements: int, *key: int, dtype: torch.dtype = torch.float64) -> Sketch:
    sketch = Sketch(num_elements, dtype, CPU)
    sketch.renew(*key)
    return sketch


def signs(num_elements: int, *key: int, dtype: torch.dtype) -> torch.Tensor:
    """The sign of every element, read off one bucketful of ones at a time."""
    sketch = new_sketch(num_elements, *key, dtype=dtype)
    found = torch.zeros(num_elements)
    for start in range(0, num_elements, BUCKETS):
        ones = torch.zeros(num_elements, dtype=dtype)
        ones[start : start + BUCKETS] = 1
        found[start : start + BUCKETS] = sketch(ones)[: num_elements - start]
    return found


def test_a_sketch_is_linear() -> None:
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(size=300_001)) for _ in range(2))
    sketch = new_sketch(len(a), 1)
    torch.testing.assert_close(sketch(2 * a - 3 * b), 2 * sketch(a) - 3 * sketch(b), rtol=0, atol=1e-10)
    torch.testing.assert_close(sketch(a), new_sketch(len(a), 1)(a), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sketches_of_the_parts_add_up_to_that_of_the_whole(dtype: torch.dtype) -> None:
    """Parts that begin within a row, a block and an array of words, and parts of one element."""
    bits = torch.finfo(dtype).bits
    ends = [0, 1, 5, BUCKETS, BLOCK_ELEMENTS - 3, 3 * BLOCK_ELEMENTS, (bits - 2) * BLOCK_ELEMENTS + 9]
    ends.append((bits + 1) * BLOCK_ELEMENTS + 77)
    whole = torch.randint(-8, 8, (ends[-1],), generator=torch.Generator().manual_seed(0)).to(dtype)  # exact sums
    sketch = new_sketch(len(whole), 5, dtype=dtype)
    parts = [sketch(whole[start:end], start) for start, end in pairwise(ends)]
    torch.testing.assert_close(torch.stack(parts).sum(0), sketch(whole), rtol=0, atol=0)
    assert sketch(whole).norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_element_has_a_sign_of_its_own(dtype: torch.dtype) -> None:
    """Over more elements than one block of words serves, so that all its bits come into use."""
    num_elements = 3 * BLOCK_ELEMENTS + 17
    found = signs(num_elements, 7, dtype=dtype)
    assert set(found.tolist()) == {-1.0, 1.0}
    assert abs(found.mean()) < 4 / math.sqrt(num_elements)
    for shift in (1, BUCKETS, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS):
        agreement = (found[shift:] * found[:-shift]).mean()
        assert abs(agreement) < 4 / math.sqrt(num_elements - shift), f"signs repeat after {shift} elements"
    fresh = signs(num_elements, 8, dtype=dtype)
    assert abs((found * fresh).mean()) < 4 / math.sqrt(num_elements), "another round has other signs"


def test_elements_are_folded_into_their_buckets() -> None:
    vector = torch.zeros(5 * BUCKETS, dtype=torch.float64)
    vector[[3, 3 + BUCKETS, 4 * BUCKETS + 10]] = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    sketch = new_sketch(len(vector), 3)(vector)
    assert sketch.nonzero().flatten().tolist() == [3, 10]
    assert abs(sketch[3]) in (9, 11)
    assert abs(sketch[10]) == 100


def test_norms_and_inner_products_of_real_gradients_survive() -> None:
    """Relative errors of sqrt(2 / r) and 1 / sqrt(r), within 4 standard errors over 200 independent sketches."""
    first, second = torch.from_numpy(sequence_gradients(2))
    errors, product_errors = [], []
    for key in range(200):
        sketch = new_sketch(len(first), key)
        mine, other = sketch(first), sketch(second)
        errors.append(float(mine @ mine / (first @ first)) - 1)
        product_errors.append(float(mine @ other - first @ second) / float(first.norm() * second.norm()))
    for found, expected in ((errors, math.sqrt(2 / BUCKETS)), (product_errors, math.sqrt(1 / BUCKETS))):
        assert abs(np.mean(found)) < 4 * expected / math.sqrt(len(found))
        # Where d is not much larger than r, elements collide less than independent ones would.
        assert np.std(found) < 1.2 * expected
