"""`NoiseScale` in a loop of one process: unbiased, with error bars that cover, whatever the loop around it does."""

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from torch import nn

from adloco_dist import NoiseEstimate, NoiseScale
from adloco_dist.noise.requests import augmented_inner_product_test, inner_product_test, norm_test
from adloco_dist.noise.sketch import Sketch
from helpers.regression import (
    NUM_SEQUENCES,
    data,
    flat,
    mean_gradient,
    new_model,
    sequence_gradients,
    sketched_statistics,
    sum_of_losses,
)

CHUNKS = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10, 11]]
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def take_update(
    model: nn.Module, noise: NoiseScale, chunks: Sequence[Sequence[int] | torch.Tensor], factor: float = 1.0
) -> NoiseEstimate | None:
    """An update in which all sequences have the same weight, and which leaves the model as it is."""
    total = sum(len(ids) for ids in chunks)
    for ids in chunks:
        (factor * sum_of_losses(model, ids) / total).backward()
        noise.observe(num_sequences=len(ids))
    estimate = noise.update(factor)
    model.zero_grad()
    return estimate


def truths() -> tuple[float, float]:
    """tr(Sigma) and |G|^2 of draws from the sequences with replacement."""
    gradients = sequence_gradients()
    mean = gradients.mean(0)
    return float((gradients - mean).square().sum(1).mean()), float(mean @ mean)


def draw(num_chunks: int, size: int) -> list[torch.Tensor]:
    return list(torch.randint(NUM_SEQUENCES, (num_chunks, size)))


@pytest.mark.parametrize(("num_chunks", "size"), [(2, 4), (6, 1)])
def test_trace_and_squared_norm_are_unbiased(num_chunks: int, size: int) -> None:
    trace, squared_norm = truths()
    model = new_model()
    torch.manual_seed(2)
    noise = NoiseScale(model, every_updates=1, span=0.0)
    found = [take_update(model, noise, draw(num_chunks, size)) for _ in range(800)]
    draws = torch.tensor([[one.trace, one.squared_norm] for one in found if one is not None])
    error = draws.std(0) / math.sqrt(len(draws))
    truth = torch.tensor([trace, squared_norm])
    assert len(draws) == 800
    assert ((draws.mean(0) - truth).abs() < 3 * error).all()
    assert (error < 0.1 * truth).all(), "too few draws to tell"


@pytest.mark.parametrize("num_chunks", [2, 3, 8])
def test_error_bars_cover_the_truth_and_little_more(num_chunks: int) -> None:
    trace, squared_norm = truths()
    model = new_model()
    torch.manual_seed(3)
    noise = NoiseScale(model, every_updates=1)
    begin = noise.state_dict()
    deviations = []
    for trial in range(40):
        noise.load_state_dict({**begin, "updates": 100 * trial})  # signs of its own
        estimate = None
        for _ in range(15):
            estimate = take_update(model, noise, draw(num_chunks, 8))
        assert estimate is not None
        deviations.append([
            (estimate.trace - trace) / estimate.trace_error,
            (estimate.squared_norm - squared_norm) / estimate.squared_norm_error,
            (estimate.noise_scale - trace / squared_norm) / estimate.noise_scale_error,
        ])  # fmt: skip
    sizes = torch.tensor(deviations).abs()
    assert ((sizes < 3).double().mean(0) >= 0.9).all()
    assert (sizes.mean(0) > 0.2).all(), "errors are of the size of the deviations, which average 0.8 of a true one"


def test_the_statistics_are_those_of_the_launchers_functions() -> None:
    """Of chunks of different sizes, sketched together as one vector."""
    gradients = torch.stack([flat(mean_gradient(ids)) for ids in CHUNKS])
    sketch = Sketch(gradients.shape[1], torch.float64, CPU)
    sketch.renew(0)
    expected = sketched_statistics(torch.stack([sketch(row) for row in gradients]), CHUNKS)
    model = new_model()
    estimate = take_update(model, NoiseScale(model), CHUNKS)
    assert estimate is not None
    assert asdict(estimate.statistics) == pytest.approx(asdict(expected), rel=1e-9)
    assert (estimate.num_chunks, estimate.num_sequences, estimate.num_measurements) == (5, 12, 1)
    assert estimate.batch_of_norm_test(0.5) == pytest.approx(norm_test(expected, 0.5).sequences)
    assert estimate.batch_of_norm_test(0.5) == pytest.approx(4 * estimate.noise_scale)
    assert estimate.batch_of_inner_product_test(0.5) == pytest.approx(inner_product_test(expected, 0.5).sequences)
    augmented = augmented_inner_product_test(expected, 0.5, 0.1)
    assert estimate.batch_of_augmented_inner_product_test(0.5, 0.1) == pytest.approx(augmented.sequences)
    assert augmented.sequences > inner_product_test(expected, 0.5).sequences, "its second part decides here"


def first_estimate(
    model: nn.Module, loss_factor: float = 1.0, loss_scale: float = 1.0, between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """The statistics of an update with CHUNKS.

    Args:
        between: called before the update ends.
    """
    noise, total = NoiseScale(model), sum(map(len, CHUNKS))
    for ids in CHUNKS:
        (loss_factor * sum_of_losses(model, ids) / total).backward()
        noise.observe(len(ids))
    between()
    estimate = noise.update(loss_scale)
    assert estimate is not None
    return asdict(estimate.statistics)


def test_what_the_loop_does_with_its_gradients_changes_nothing() -> None:
    model = new_model()
    expected = pytest.approx(first_estimate(model), rel=1e-9)
    assert first_estimate(model) == expected, "nor gradients that were never zeroed"
    model.zero_grad(set_to_none=False)
    assert first_estimate(model, between=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == expected
    assert first_estimate(model, loss_factor=1024, loss_scale=1024) == expected
    compiled = torch.compile(model, backend="aot_eager")
    assert first_estimate(compiled) == expected  # pyright: ignore[reportArgumentType]


def test_a_factor_of_the_loss_leaves_batches_as_they_are() -> None:
    plain, scaled = first_estimate(new_model()), first_estimate(new_model(), loss_factor=3.0)
    assert scaled["trace"] == pytest.approx(9 * plain["trace"])
    assert scaled["trace"] / scaled["squared_norm"] == pytest.approx(plain["trace"] / plain["squared_norm"])


def test_frozen_parameters_are_in_no_gradient_and_half_precision_is_sketched_in_single() -> None:
    model = new_model()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    partial, whole = first_estimate(model), first_estimate(new_model())
    assert partial["trace"] < whole["trace"]
    assert first_estimate(new_model(torch.bfloat16))["trace"] == pytest.approx(whole["trace"], rel=0.1)


def test_one_update_in_so_many_is_measured_and_the_others_have_no_hooks() -> None:
    model = new_model()
    noise = NoiseScale(model, every_updates=3)
    estimates, hooked = [], []
    for _ in range(7):
        hooked.append(any(parameter._backward_hooks for parameter in model.parameters()))
        estimates.append(take_update(model, noise, CHUNKS))
    assert [one is not None for one in estimates] == hooked == [True, False, False, True, False, False, True]
    counts = [one.num_measurements for one in estimates if one is not None]
    assert counts == [1, 2, 3]


def test_two_chunks_have_an_error_from_the_second_measurement_on() -> None:
    model = new_model()
    noise = NoiseScale(model, every_updates=1)
    first, second = (take_update(model, noise, chunks) for chunks in (CHUNKS[:2], CHUNKS[2:4]))
    assert first is not None and second is not None
    assert first.trace_error == first.noise_scale_error == math.inf
    assert 0 < second.trace_error < math.inf
    # Each of the two is taken to err by half of their squared difference, and counts as half.
    shares = 0.5, 0.5
    apart = abs(second.trace - first.trace) / shares[1]
    assert second.trace_error == pytest.approx(math.sqrt((shares[0] ** 2 + shares[1] ** 2) / 2) * apart)


def test_many_passes_are_united_to_a_number_of_chunks_that_is_bounded() -> None:
    model = new_model()
    singles = [[number] for number in range(NUM_SEQUENCES)]
    estimate = take_update(model, NoiseScale(model), singles)
    assert estimate is not None
    assert (estimate.num_chunks, estimate.num_sequences) == (64, NUM_SEQUENCES)
    bounds = torch.tensor([len(part) for part in torch.arange(NUM_SEQUENCES).tensor_split(64)]).cumsum(0).tolist()
    united = [list(range(start, end)) for start, end in pairwise([0, *bounds])]
    by_hand = take_update(model, NoiseScale(model), united)
    assert by_hand is not None
    assert asdict(estimate.statistics) == pytest.approx(asdict(by_hand.statistics), rel=1e-9)


def test_a_line_for_people() -> None:
    model = new_model()
    number = r"[\d.e+-]+"
    pattern = (
        rf"noise scale {number} ± {number} sequences \(trace {number} ± {number}, squared norm {number} ± {number}; "
        r"5 chunks of 12 sequences, measurement 1\)"
    )
    assert re.fullmatch(pattern, str(take_update(model, NoiseScale(model), CHUNKS)))


def test_a_resumed_measurement_is_the_uninterrupted_one() -> None:
    model = new_model()
    noise, resumed = NoiseScale(model, every_updates=2), NoiseScale(model, every_updates=2)
    for chunks in (CHUNKS, CHUNKS[:2], CHUNKS[1:]):
        take_update(model, noise, chunks)
    state = json.loads(json.dumps(noise.state_dict()))
    resumed.load_state_dict(state)
    continued = [[take_update(model, one, CHUNKS[:chunks]) for chunks in (3, 2, 5)] for one in (noise, resumed)]
    assert continued[0] == continued[1]
    assert continued[0][0] is None and continued[0][1] is not None
    assert noise.state_dict() == resumed.state_dict() != state


@pytest.mark.parametrize(
    ("chunks", "factor", "reason"),
    [
        ([], 1.0, "0 chunk(s) to compare; it takes two backward passes or two ranks"),
        ([[0, 1]], 1.0, "1 chunk(s) to compare"),
        (CHUNKS, math.inf, "gradients are not finite"),
    ],
)
def test_what_cannot_be_measured_is_left_out_and_logged_once(
    chunks: list[list[int]], factor: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model()
    noise = NoiseScale(model, every_updates=1)
    before = take_update(model, noise, CHUNKS)
    averages = {**noise.state_dict(), "updates": None}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for ids in chunks:
                (factor * sum_of_losses(model, ids)).backward()
                noise.observe(len(ids))
            assert noise.update() is None
            model.zero_grad()
    assert before is not None
    assert {**noise.state_dict(), "updates": None} == averages
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]


def test_bad_arguments_are_refused_in_one_line() -> None:
    model, frozen = new_model(), new_model().requires_grad_(False)
    two_devices = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: NoiseScale(frozen), "model=Sequential: none of its parameters requires a gradient"),
        (lambda: NoiseScale(two_devices), "model=ModuleList: its parameters are on cpu, meta; keep them on one device"),
        (lambda: NoiseScale(model, every_updates=0), "every_updates=0: must be >= 1"),
        (lambda: NoiseScale(model, span=1.5), "span=1.5: must be in [0, 1]"),
        (lambda: NoiseScale(model).observe(0), "num_sequences=0: must be >= 1"),
        (lambda: NoiseScale(model).observe(3), "observe(num_sequences=3): no gradient reached the model's parameters"),
        (lambda: NoiseScale(model).update(loss_scale=0.0), "loss_scale=0.0: must be > 0"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_a_pass_that_was_not_observed_is_an_error() -> None:
    model = new_model()
    noise = NoiseScale(model)
    sum_of_losses(model, [0, 1]).backward()
    noise.observe(2)
    with pytest.raises(ValueError, match="no gradient reached"):
        noise.observe(2)
    sum_of_losses(model, [0, 1]).backward()
    with pytest.raises(ValueError, match=r"a backward pass was not observed; call observe\(num_sequences\) after each"):
        noise.update()


def test_the_regression_has_noise_and_signal() -> None:
    trace, squared_norm = truths()
    assert 2 < trace / squared_norm < 200
    assert data()[0].shape == (NUM_SEQUENCES, 6)
