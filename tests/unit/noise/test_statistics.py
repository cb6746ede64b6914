"""Gradient statistics: unbiased, and the same numbers as the definitions on exact gradients."""

import math

import numpy as np
import pytest
import torch

from adloco_dist.noise.estimation import (
    MIN_CHUNKS_FOR_JACKKNIFE,
    jackknife_covariance,
    statistics_from_gram,
)
from adloco_dist.noise.statistics import GradientStatistics, Smoothed, num_chunks, ratio
from helpers.support import Matrix, sequence_gradients

SIZES = torch.tensor([2, 2, 2, 1, 2, 2, 2, 1], dtype=torch.float64)
"""Eight chunks that are not all alike."""


@pytest.fixture(scope="module")
def gradients() -> Matrix:
    return sequence_gradients(60)


def averaging(sizes: torch.Tensor) -> torch.Tensor:
    """(J, S): rows that average the sequences of each chunk."""
    chunk_of_sequence = torch.arange(len(sizes)).repeat_interleave(sizes.int())
    return torch.nn.functional.one_hot(chunk_of_sequence).T / sizes[:, None]


def mean_and_error(draws: list[float]) -> tuple[float, float]:
    return float(np.mean(draws)), float(np.std(draws) / math.sqrt(len(draws)))


def test_trace_and_squared_norm_are_unbiased_on_real_gradients(gradients: Matrix) -> None:
    """Draws with replacement, so the population's own moments are the truth."""
    gradient = gradients.mean(0)
    trace = float(((gradients - gradient) ** 2).sum(1).mean())
    products = torch.from_numpy(gradients @ gradients.T)
    generator, chunks = torch.Generator().manual_seed(1), averaging(SIZES)
    traces, norms, plugin_norms = [], [], []
    for _ in range(20_000):
        drawn = torch.randint(len(gradients), (int(SIZES.sum()),), generator=generator)
        measured = statistics_from_gram(chunks @ products[drawn][:, drawn] @ chunks.T, SIZES)
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
    generator = torch.Generator().manual_seed(2)
    gradient = torch.tensor([1.0, -0.5, 0.3, 0.0, 0.8, 0.1], dtype=torch.float64)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    sigma, total = root @ root.T, SIZES.sum()
    draws = []
    for noise in torch.randn(40_000, len(SIZES), 6, generator=generator, dtype=torch.float64):
        chunks = gradient + noise @ root.T / SIZES.sqrt()[:, None]
        draws.append(statistics_from_gram(chunks @ chunks.T, SIZES, plugin).ip_variance)
    mean, error = mean_and_error(draws)
    truth = float(gradient @ sigma @ gradient)
    extra = float((sigma @ sigma).trace() / total)
    assert extra > 20 * error, "too few draws to tell the two apart"
    assert abs(mean - truth - (extra if plugin else 0.0)) < 3 * error


def test_by_hand() -> None:
    """Two chunks of 1 and 3 sequences with gradients (3, 0) and (1, 4): gbar = (1.5, 3)."""
    rows, sizes = torch.tensor([[3.0, 0.0], [1.0, 4.0]]), torch.tensor([1.0, 3.0])
    measured = statistics_from_gram(rows @ rows.T, sizes)
    trace = (1 * 9 + 3 * 17) - 4 * 11.25
    assert measured.trace == pytest.approx(trace)
    assert measured.mean_squared_norm == pytest.approx(11.25)
    assert measured.squared_norm == pytest.approx(11.25 - trace / 4)
    ip_variance = 1 * (4.5 - 11.25) ** 2 + 3 * (13.5 - 11.25) ** 2
    assert measured.ip_variance == pytest.approx(ip_variance), "two chunks are too few to take gbar's noise out"
    assert not measured.ip_corrected
    assert measured.ip_squared_norm == measured.mean_squared_norm
    assert measured.ip_error == 0
    assert measured.orthogonal_variance == pytest.approx(max(0.0, trace - ip_variance / 11.25))
    assert measured.noise_scale == pytest.approx(trace / (11.25 - trace / 4))


def test_what_sketches_add_to_inner_products_is_taken_out() -> None:
    gram, sizes = torch.tensor([[9.0, 3.0], [3.0, 17.0]]), torch.tensor([1.0, 3.0])
    exact = statistics_from_gram(gram, sizes)
    sketched = statistics_from_gram(gram, sizes, sketch_size=100)
    assert sketched.ip_error == pytest.approx(exact.trace * 11.25 / 100)
    assert sketched.ip_variance == pytest.approx(exact.ip_variance - sketched.ip_error)
    assert sketched.trace == exact.trace


def test_equal_gradients_have_no_variance() -> None:
    rows = torch.tensor([[1.0, 2.0]]).expand(5, 2)
    measured = statistics_from_gram(rows @ rows.T, torch.arange(1.0, 6.0))
    assert measured.trace == pytest.approx(0, abs=1e-12)
    assert measured.squared_norm == pytest.approx(5)
    assert measured.ip_variance == pytest.approx(0, abs=1e-12)
    assert measured.orthogonal_variance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("sizes", [[1.0] * MIN_CHUNKS_FOR_JACKKNIFE, [4.0, 1.0, 2.0, 3.0], [2.0] * 12])
def test_the_jackknife_meets_the_spread_of_the_estimates(sizes: list[float]) -> None:
    """It is never below the variance in expectation (Efron and Stein 1981), and above it where chunks are few."""
    generator = torch.Generator().manual_seed(3)
    gradient, weights = torch.linspace(-1, 1, 10, dtype=torch.float64), torch.tensor(sizes, dtype=torch.float64)
    scales = torch.linspace(0.2, 2, 10, dtype=torch.float64)
    estimates, covariances = [], []
    for noise in torch.randn(4000, len(sizes), 10, generator=generator, dtype=torch.float64):
        chunks = gradient + scales * noise / weights.sqrt()[:, None]
        gram = chunks @ chunks.T
        measured = statistics_from_gram(gram, weights)
        estimates.append([measured.trace, measured.squared_norm])
        covariances.append(jackknife_covariance(gram, weights))
    spread, jackknife = torch.tensor(estimates, dtype=torch.float64).T.cov(), torch.stack(covariances).mean(0)
    excess = jackknife.diag() / spread.diag()
    assert excess.min() > 0.9
    assert excess.max() < 1 + 6 / len(sizes)


def test_leaving_out_one_chunk_is_measuring_without_it() -> None:
    generator = torch.Generator().manual_seed(4)
    chunks, sizes = torch.randn(5, 7, generator=generator, dtype=torch.float64), torch.tensor([1.0, 2, 1, 3, 2])
    without = []
    for left_out in range(5):
        kept = torch.arange(5) != left_out
        measured = statistics_from_gram(chunks[kept] @ chunks[kept].T, sizes[kept])
        without.append([measured.trace, measured.squared_norm])
    expected = torch.tensor(without, dtype=torch.float64).T.cov(correction=0) * 4
    torch.testing.assert_close(jackknife_covariance(chunks @ chunks.T, sizes), expected)


def made(
    trace: float, squared_norm: float = 1.0, sequences: float = 8.0, ip_corrected: bool = True
) -> GradientStatistics:
    """Statistics whose inner-product variance is twice the trace."""
    return GradientStatistics(trace, squared_norm, sequences, 2 * trace, 0.0, ip_corrected)


def averaged(several: list[GradientStatistics], span: float, tokens: int = 100) -> GradientStatistics:
    """After one round of `tokens` for each."""
    smoothed = Smoothed()
    for round_, one in enumerate(several, start=1):
        smoothed = smoothed.after(one, round_ * tokens, span)
    assert smoothed.statistics is not None
    return smoothed.statistics


def test_an_average_spans_a_share_of_the_tokens_so_far() -> None:
    assert averaged([made(10.0), made(20.0), made(30.0)], 0.2).trace == pytest.approx(20), "three rounds at least"
    # The fourth replaces a third of it, and so on.
    assert averaged([made(10.0), made(20.0), made(30.0), made(50.0)], 0.2).trace == pytest.approx((20 * 2 + 50) / 3)
    assert averaged([made(10.0)] * 99 + [made(20.0)], 0.2).trace == pytest.approx(10 + 10 / 20), (
        "a twentieth of 20 rounds"
    )
    assert averaged([made(1.0), made(5.0)], 0.0) == made(5.0)
    assert averaged([made(1.0), made(2.0)], 1.0, tokens=7).ip_variance == pytest.approx(3)


@pytest.mark.parametrize("num_rounds", [24, 60])
def test_an_average_follows_a_signal_that_falls_two_hundredfold(num_rounds: int) -> None:
    """|G|^2 from 28 to 0.14; decay 0.9 a round asked for 0.13 of the right batch in 24 rounds, 0.31 in 60."""
    norms = [28 * (0.14 / 28) ** (round_ / (num_rounds - 1)) for round_ in range(num_rounds)]
    shares = [
        averaged([made(50.0, norm) for norm in norms[: count + 1]], 0.15).noise_scale / (50.0 / norms[count])
        for count in range(num_rounds)
    ]
    assert min(shares) > 0.4
    assert float(np.median(shares)) > 0.5
    assert max(shares) <= 1


def test_an_odd_measurement_counts_as_three_times_the_average_at_most() -> None:
    odd = averaged([made(10.0, 2.0)] * 10 + [made(1000.0, 200.0)], 0.2)
    assert odd.trace == pytest.approx((2 * 10 + 30) / 3)
    assert odd.squared_norm == pytest.approx((2 * 2 + 6) / 3), "what was odd about it were its gradients' lengths"
    assert odd.noise_scale == pytest.approx(5)


def test_averages_hold_nothing_of_the_batches_they_were_measured_with() -> None:
    """|gbar|^2, and V_ip with gbar's noise in it, depend on the batch: an average has those of the last one."""
    small, large = made(40.0, 1.0, sequences=4), made(40.0, 1.0, sequences=400)
    for measured, expected in (([large, small], 11.0), ([small, large], 1.1)):
        assert averaged(measured, 0.5).mean_squared_norm == pytest.approx(expected)
    left_in = [made(10.0, ip_corrected=False), made(30.0, ip_corrected=False)]
    assert averaged(left_in, 0.5).trace == pytest.approx(20)
    assert averaged(left_in, 0.5).ip_variance == 60, "the last one's"


def test_the_part_across_the_gradient_is_formed_of_averages() -> None:
    """tr(Sigma) 50, V_ip / |G|^2 = 5: the mean of ratios of single rounds' noisy numbers is another."""
    rng = np.random.default_rng(0)
    rounds = [
        GradientStatistics(50.0, 1.0 + noise, 8.0, 5.0 + other, 0.0, True)
        for noise, other in rng.normal(0, 0.8, (400, 2))
    ]
    assert averaged(rounds, 1.0).orthogonal_variance == pytest.approx(45, abs=0.5)
    assert abs(np.mean([one.orthogonal_variance for one in rounds]) - 45) > 2, "as it was formed before"


def test_a_merge_carries_its_members_averages_on_at_half_their_weight() -> None:
    members = []
    for trace in (10.0, 20.0):
        smoothed = Smoothed()
        for round_ in range(1, 41):
            smoothed = smoothed.after(made(trace), round_ * 100, 0.2)
        members.append(smoothed)
    merged = Smoothed.of_merged([(0.25, members[0]), (0.75, members[1])])
    assert merged.statistics is not None
    assert merged.statistics.trace == pytest.approx(17.5)
    next_one = merged.after(made(27.5), 4200, 0.2).statistics
    assert next_one is not None
    assert next_one.trace == pytest.approx(17.5 + 10 * 200 / 600), "they stand on 400 tokens, half of 800"
    assert Smoothed.of_merged([(1.0, Smoothed()), (0.0, members[0])]) == Smoothed(), "nothing measured, nothing kept"


def test_chunks_hold_two_sequences_or_more_where_that_leaves_two() -> None:
    assert [num_chunks(batch) for batch in range(1, 12)] == [1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4]
    assert num_chunks(100) == 4


def test_ratios() -> None:
    assert ratio(6.0, 2.0) == 3.0
    assert ratio(1.0, 0.0) == ratio(1.0, -2.0) == math.inf
    assert ratio(0.0, 0.0) == ratio(-1.0, 5.0) == 0.0
