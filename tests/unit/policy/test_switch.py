"""Switch mode, exhaustively for small numbers: how a batch is taken, and in which passes."""

import math
from itertools import product

import torch
from torch import nn

from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.indexed import permutation
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.batch import BatchInputs, BatchPlan, BatchReport
from adloco_dist.policy.passes import Passes
from adloco_dist.policy.report import smallest_capacity
from adloco_dist.policy.request import automatic_n, switch
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import mean_gradient, micro_batch_size
from helpers.support import (
    VOCAB_SIZE,
    first_batch,
    next_batch,
    small_module,
    small_objective,
    small_settings,
    small_store,
)

LIMITS, BATCHES, FACTORS = range(1, 7), range(1, 30), (1.0, 1.5, 2.0, 3.0)


def test_threshold_clips_up_to_n_limits_and_accumulates_above() -> None:
    for limit, batch, n in product(LIMITS, BATCHES, FACTORS):
        taken = switch(batch, limit, n)
        if batch <= limit:
            assert taken == (batch, "whole")
        elif batch <= n * limit:
            assert taken == (limit, "clipped")
        else:
            assert taken == (batch, "accumulated")


def test_accumulation_only_and_clipping_only() -> None:
    for limit, batch in product(LIMITS, BATCHES):
        accumulated, clipped = (switch(batch, limit, n) for n in (1, None))
        assert accumulated == (batch, "whole" if batch <= limit else "accumulated")
        assert clipped == (min(batch, limit), "whole" if batch <= limit else "clipped")


def test_without_a_limit_every_batch_is_taken_whole() -> None:
    for batch, n in product(BATCHES, (1.0, None)):
        assert switch(batch, None, n) == (batch, "whole")


def test_a_batch_that_was_given_is_never_clipped() -> None:
    for n in (2, 1, "null"):
        given = compose(["batching.request=none", "batching.local_batch=3", f"batching.switch_n={n}"])
        assert first_batch(given, BatchInputs(num_workers=1, batch_limit=2)).local_batch == 3
    tested = compose(["batching.request=norm_test", "batching.local_batch=3"])
    assert first_batch(tested, BatchInputs(num_workers=1, batch_limit=2)).local_batch == 2


class Recorder(LanguageObjective):
    """Remembers the sequences of each micro-batch."""

    def __init__(self, settings: Settings) -> None:
        objective = small_objective(settings)
        super().__init__(settings, objective.config, Vocabulary(VOCAB_SIZE))
        self.micro_batches: list[torch.Tensor] = []

    def loss(self, module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
        self.micro_batches.append(batch.tokens)
        return super().loss(module, batch)


def test_an_update_sees_exactly_the_planned_sequences_with_equal_weights() -> None:
    settings = small_settings()
    flat_model = FlatModel(small_module(settings), torch.device("cpu"), settings.precision)
    flat_model.initial_weights()
    store = small_store()
    own = torch.stack([gradient_of(flat_model, part) for part in store.batch(permutation(14)).split(1)])
    for limit, batch in product(range(1, 6), range(1, 15)):
        taken, _ = switch(batch, limit, 2.0)
        wanted = store.batch(permutation(14)[:taken])
        recorder = Recorder(settings)
        mean_gradient(flat_model, recorder, wanted, limit)
        assert torch.equal(torch.cat(recorder.micro_batches), wanted.tokens)
        sizes = [len(part) for part in recorder.micro_batches]
        assert len(sizes) == math.ceil(taken / limit)
        assert len(set(sizes[:-1])) <= 1, "equal but the last"
        assert sizes[-1] <= sizes[0] <= limit
        torch.testing.assert_close(flat_model.gradient, own[:taken].mean(0), rtol=0, atol=1e-12)


def gradient_of(flat_model: FlatModel, batch: TokenBatch) -> torch.Tensor:
    mean_gradient(flat_model, small_objective(small_settings()), batch, None)
    return flat_model.gradient.clone()


def test_passes_are_as_few_as_capacity_allows() -> None:
    for batch in range(1, 40):
        assert micro_batch_size(batch, None) == batch
        for capacity in range(1, 45):
            size = micro_batch_size(batch, capacity)
            assert size <= capacity
            assert math.ceil(batch / size) == math.ceil(batch / capacity)
    assert smallest_capacity([None, 3, None, 5]) == 3
    assert smallest_capacity([None, None]) is None


def test_automatic_n_accumulates_exactly_where_progress_per_second_rises() -> None:
    """Against the model itself: x / (x + phi) progress in x t_pass + t_fixed seconds."""
    limit, micro_batch_seconds = 8, 2.0
    for batch, noise_scale, fixed in product((9, 16, 40, 200), (1.0, 30.0, 400.0, math.inf), (0.0, 0.5, 3.0, 50.0)):
        phi, multiple = noise_scale / limit, batch / limit

        def progress_per_second(x: float, phi: float = phi, fixed: float = fixed) -> float:
            # Divided by phi's share, so that pure noise (phi infinite) has a limit: progress grows with x.
            gain = x if math.isinf(phi) else x / (x + phi)
            return gain / (x * micro_batch_seconds + fixed)

        n = automatic_n(batch, limit, noise_scale, micro_batch_seconds, fixed)
        _, mode = switch(batch, limit, n)
        better = progress_per_second(multiple) >= progress_per_second(1.0) * (1 - 1e-12)
        assert (mode == "accumulated") == better, (batch, noise_scale, fixed)


def test_automatic_n_is_planned_from_what_was_measured() -> None:
    """8 sequences wanted above a limit of 2, noise scale 32: accumulating pays from 1/4 of 16 passes on."""
    settings: Settings = compose(
        ["batching.local_batch=8", "batching.switch_n=auto", "batching.eta=2", "batching.span=0"]
    )
    statistics = GradientStatistics(32.0, 1.0, 2.0, 1.0, 0.0, True)
    inputs = BatchInputs(num_workers=1, batch_limit=2)

    def planned(sequence_seconds: float, seconds_per_update: float) -> BatchPlan:
        first = first_batch(settings, inputs)
        assert (first.switch_n, first.mode, first.local_batch) == (2.0, "accumulated", 8)
        passes = [Passes(4, 8, 8 * sequence_seconds)] if sequence_seconds else []
        report = BatchReport(statistics, passes, seconds_per_update, local_batch=8)
        return next_batch(settings, inputs, first, report, 0.1, 100)

    # A pass of 2 takes 2 s and everything else 0.5 s: x = 4 against phi t_fixed / t_pass = 16 * 0.25 = 4.
    assert planned(1.0, 8.5).mode == "accumulated"
    assert planned(1.0, 8.4).mode == "clipped"
    assert planned(1.0, 8.4).local_batch == 2
    assert planned(0.0, 0.0).switch_n == 2.0, "not measured"
