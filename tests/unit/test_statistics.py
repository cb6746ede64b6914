"""Gradient statistics: unbiased (invariant 8), and the same numbers as the definitions on exact gradients."""

import math

import numpy as np
import pytest
from support import Matrix, sequence_gradients

from adloco_dist.decisions.statistics import (
    GradientStatistics,
    Smoothed,
    num_chunks,
    ratio,
    statistics_from_gram,
    statistics_from_moments,
)

SIZES = np.array([2, 2, 2, 1, 2, 2, 2, 1], dtype=np.float64)
"""Eight chunks that are not all alike."""


@pytest.fixture(scope="module")
def gradients() -> Matrix:
    return sequence_gradients(60)


def averaging(sizes: Matrix) -> Matrix:
    """(J, S): rows that average the sequences of each chunk."""
    ends = np.cumsum(sizes).astype(int)
    matrix = np.zeros((len(sizes), ends[-1]))
    for chunk, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        matrix[chunk, end - int(size) : end] = 1 / size
    return matrix


def mean_and_error(draws: list[float]) -> tuple[float, float]:
    return float(np.mean(draws)), float(np.std(draws) / math.sqrt(len(draws)))


def test_trace_and_squared_norm_are_unbiased_on_real_gradients(gradients: Matrix) -> None:
    """Draws with replacement, so the population's own moments are the truth."""
    gradient = gradients.mean(0)
    trace = float(((gradients - gradient) ** 2).sum(1).mean())
    products = gradients @ gradients.T
    rng, chunks = np.random.default_rng(1), averaging(SIZES)
    traces, norms, plugin_norms = [], [], []
    for _ in range(20_000):
        drawn = rng.integers(0, len(gradients), int(SIZES.sum()))
        measured = statistics_from_gram(chunks @ products[np.ix_(drawn, drawn)] @ chunks.T, SIZES, plugin=False)
        traces.append(measured.trace)
        norms.append(measured.squared_norm)
        plugin_norms.append(measured.mean_squared_norm)
    for draws, truth in ((traces, trace), (norms, float(gradient @ gradient))):
        mean, error = mean_and_error(draws)
        assert abs(mean - truth) < 3 * error
        assert error < 0.05 * truth, "too few draws to tell"
    mean, error = mean_and_error(plugin_norms)
    assert abs(mean - gradient @ gradient) > 10 * error, "the plug-in norm holds the noise"


@pytest.mark.parametrize("plugin", [False, True])
def test_the_inner_product_variance_meets_its_expectation(plugin: bool) -> None:
    """Gaussian gradients of 6 parameters: G'Sigma G, and with gbar's noise left in, tr(Sigma^2) / S more."""
    rng = np.random.default_rng(2)
    gradient = np.array([1.0, -0.5, 0.3, 0.0, 0.8, 0.1])
    root = rng.normal(size=(6, 6))
    sigma, total = root @ root.T, SIZES.sum()
    draws = []
    for _ in range(40_000):
        chunks = gradient + rng.normal(size=(len(SIZES), 6)) @ root.T / np.sqrt(SIZES)[:, None]
        draws.append(statistics_from_gram(chunks @ chunks.T, SIZES, plugin).ip_variance)
    mean, error = mean_and_error(draws)
    truth = gradient @ sigma @ gradient
    extra = np.trace(sigma @ sigma) / total
    assert extra > 20 * error, "too few draws to tell the two apart"
    assert abs(mean - truth - (extra if plugin else 0.0)) < 3 * error


def test_by_hand() -> None:
    """Two chunks of 1 and 3 sequences with gradients (3, 0) and (1, 4): gbar = (1.5, 3)."""
    rows, sizes = np.array([[3.0, 0.0], [1.0, 4.0]]), np.array([1.0, 3.0])
    measured = statistics_from_gram(rows @ rows.T, sizes, plugin=False)
    trace = (1 * 9 + 3 * 17) - 4 * 11.25
    assert measured.trace == pytest.approx(trace)
    assert measured.mean_squared_norm == pytest.approx(11.25)
    assert measured.squared_norm == pytest.approx(11.25 - trace / 4)
    ip_variance = 1 * (4.5 - 11.25) ** 2 + 3 * (13.5 - 11.25) ** 2
    assert measured.ip_variance == pytest.approx(ip_variance), "two chunks are too few to take gbar's noise out"
    assert measured.ip_squared_norm == measured.mean_squared_norm
    assert measured.ip_error == 0
    assert measured.orthogonal_variance == pytest.approx(max(0.0, trace - ip_variance / 11.25))
    assert measured.noise_scale == pytest.approx(trace / (11.25 - trace / 4))


def test_what_sketches_add_to_inner_products_is_taken_out() -> None:
    norms, products = np.array([9.0, 17.0]), np.array([4.5, 13.5])
    exact = statistics_from_moments(norms, products, 11.25, np.array([1.0, 3.0]))
    sketched = statistics_from_moments(norms, products, 11.25, np.array([1.0, 3.0]), sketch_size=100)
    assert sketched.ip_error == pytest.approx(exact.trace * 11.25 / 100)
    assert sketched.ip_variance == pytest.approx(exact.ip_variance - sketched.ip_error)
    assert sketched.trace == exact.trace


def test_equal_gradients_have_no_variance() -> None:
    rows = np.tile(np.array([[1.0, 2.0]]), (5, 1))
    measured = statistics_from_gram(rows @ rows.T, np.array([1.0, 2, 3, 4, 5]), plugin=False)
    assert measured.trace == pytest.approx(0, abs=1e-12)
    assert measured.squared_norm == pytest.approx(5)
    assert measured.ip_variance == pytest.approx(0, abs=1e-12)
    assert measured.orthogonal_variance == pytest.approx(0, abs=1e-12)


def test_smoothing_is_a_bias_corrected_average_of_each_number() -> None:
    def made(value: float) -> GradientStatistics:
        return GradientStatistics(value, 2 * value, 3 * value, 4 * value, 5 * value, 6 * value, 7 * value)

    smoothed = Smoothed()
    for value in (10.0, 20.0, 40.0):
        smoothed = smoothed.after(made(value), 0.9)
    expected = (0.81 * 10 + 0.9 * 20 + 40) / (0.81 + 0.9 + 1)
    assert smoothed.statistics is not None
    assert smoothed.statistics.trace == pytest.approx(expected)
    assert smoothed.statistics.orthogonal_variance == pytest.approx(7 * expected)
    assert smoothed.weight == pytest.approx(1 - 0.9**3)
    assert Smoothed().after(made(3.0), 0.9).statistics == made(3.0), "the first value counts in full"
    forgetful = Smoothed().after(made(1.0), 0.0).after(made(5.0), 0.0)
    assert forgetful.statistics == made(5.0)


def test_chunks_hold_two_sequences_or_more_where_that_leaves_two() -> None:
    assert [num_chunks(batch, most=4) for batch in range(1, 12)] == [1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4]
    assert num_chunks(100, most=2) == 2


def test_ratios() -> None:
    assert ratio(6.0, 2.0) == 3.0
    assert ratio(1.0, 0.0) == ratio(1.0, -2.0) == math.inf
    assert ratio(0.0, 0.0) == ratio(-1.0, 5.0) == 0.0
