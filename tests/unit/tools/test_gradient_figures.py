"""What the figures of batches' gradients come to: tr(Sigma) of a finite set of sequences, quartiles, batch sizes."""

from itertools import combinations

import numpy as np
import pytest

from adloco_dist.launch.analyze import main
from adloco_dist.tools.gradients import Vector, quartiles, traces_of

NUM_SEQUENCES, NUM_ELEMENTS = 6, 5


def traces_of_all(gradients: Vector, targets: Vector, size: int) -> Vector:
    """The estimates of all batches of that size that can be drawn from the sequences.

    Args:
        gradients: (N, elements), the mean over each sequence's targets.
        targets: (N,).
    """
    full = targets @ gradients / targets.sum()
    chosen = [list(ids) for ids in combinations(range(len(targets)), size)]
    of_batches = [targets[ids] @ gradients[ids] / targets[ids].sum() for ids in chosen]
    relative_sizes = np.array([targets[ids].sum() for ids in chosen]) / targets.mean()
    squared_deviations = np.array([np.sum((gradient - full) ** 2) for gradient in of_batches])
    return traces_of(size, relative_sizes, squared_deviations, len(targets))


@pytest.mark.parametrize("targets", [np.full(NUM_SEQUENCES, 7.0), np.array([1.0, 9.0, 3.0, 3.0, 2.0, 6.0])])
def test_over_all_batches_the_trace_is_exactly_that_of_the_sequences(targets: Vector) -> None:
    gradients = np.random.default_rng(0).normal(1.0, 2.0, size=(NUM_SEQUENCES, NUM_ELEMENTS))
    centred = gradients - targets @ gradients / targets.sum()
    exact = np.mean(np.sum((targets / targets.mean())[:, None] ** 2 * centred**2, axis=1))
    if targets.std() == 0:
        assert exact == pytest.approx(np.trace(np.cov(gradients.T, bias=True)), rel=1e-12)
    for size in range(1, NUM_SEQUENCES):
        traces = traces_of_all(gradients, targets, size)
        assert traces.mean() == pytest.approx(exact, rel=1e-12), size
    assert np.isnan(traces_of_all(gradients, targets, NUM_SEQUENCES)).all()


def test_quartiles_of_known_values() -> None:
    expected = {"mean": 3.0, "lower_quartile": 2.0, "median": 3.0, "upper_quartile": 4.0}
    assert quartiles(np.array([5.0, 1.0, 4.0, 2.0, 3.0])) == expected


@pytest.mark.parametrize("batches", ["1,x", "0", "4,,8", "-1", "1.5", ""])
def test_batch_sizes_that_are_none(batches: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["runs/none", f"--batches={batches}"])
    detail = f"error: --batches={batches}: must be whole numbers >= 1 with commas between, as 1,4,16\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, detail)
