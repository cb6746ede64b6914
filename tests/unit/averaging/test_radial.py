"""Norms in the same bits everywhere, radial means, and norms that are outliers."""

from math import isnan

import pytest
import torch

from adloco_dist.averaging.outliers import NormHistory
from adloco_dist.averaging.radial import exact_norms, restore_lengths


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_norms_depend_on_no_order(scale: float, dtype: torch.dtype) -> None:
    vectors = [torch.randn(size, dtype=dtype) * scale for size in (1, 1000, 1 << 20, (1 << 20) + 1)]
    norms = exact_norms(vectors)
    for vector, norm in zip(vectors, norms, strict=True):
        assert norm == pytest.approx(float(vector.double().norm()), rel=1e-5)
    assert exact_norms([vector[torch.randperm(len(vector))] for vector in vectors]) == norms


def test_norms_of_nothing_and_of_what_is_not_finite() -> None:
    assert exact_norms([]) == []
    zero, infinite, nan, tiny = exact_norms(
        [torch.zeros(5), torch.tensor([1.0, torch.inf]), torch.tensor([torch.nan, 1.0]),
         torch.tensor([5e-324], dtype=torch.float64)]
    )  # fmt: skip
    assert zero == 0 and isnan(infinite) and isnan(nan)
    assert 0 <= tiny < 1e-300


def test_sums_take_lengths_and_keep_directions() -> None:
    sums = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    restore_lengths(sums, [10.0, 7.0])
    assert sums[0].tolist() == [6.0, 8.0]
    assert sums[1].tolist() == [0.0, 0.0], "there is no direction"


def test_opposite_workers_leave_no_direction() -> None:
    one = torch.randn(100)
    total = one / one.norm() - one / one.norm()
    restore_lengths([total], [2.0])
    assert not total.any()


def test_a_norm_far_above_the_others_is_an_outlier() -> None:
    history = NormHistory(2)
    assert not any(history.is_outlier(0, 1.0 + 0.1 * (number % 2), 3.0, 10) for number in range(10))
    assert not history.is_outlier(0, 1.15, 3.0, 10)
    assert history.is_outlier(0, 5.0, 3.0, 10)
    assert not history.is_outlier(0, 1.1, 3.0, 10), "one outlier does not move the bound far"
    assert not history.is_outlier(0, 0.1, 3.0, 10), "a small norm is none"
    assert not any(history.is_outlier(1, 5.0 * number, 3.0, 10) for number in range(10)), "each fragment has its own"


def test_norms_that_stay_high_are_accepted_in_the_end() -> None:
    history = NormHistory(1)
    for number in range(50):
        history.is_outlier(0, 1.0 + 0.1 * (number % 2), 3.0, 10)
    left_out = [history.is_outlier(0, 3.0, 3.0, 10) for _ in range(500)]
    assert left_out[0] and not left_out[-1]
