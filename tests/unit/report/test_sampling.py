"""Long curves lose points, and no extreme."""

import numpy as np

from adloco_dist.report.charts import stretches
from adloco_dist.report.figures import STRETCHES, Curve, kept


def test_short_curves_are_drawn_whole() -> None:
    values = np.array([1.0, np.nan, 3.0, np.inf])
    assert kept(values).tolist() == [0, 2]


def test_a_spike_of_one_round_is_drawn() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[[12_345, 77_777]] = 50.0, -60.0
    values[500:700] = np.nan
    drawn = kept(values)
    assert len(drawn) <= 4 * STRETCHES
    assert {0, 12_345, 77_777, 99_999} <= set(drawn.tolist())
    assert np.isfinite(values[drawn]).all()
    assert (np.diff(drawn) > 0).all()


def test_points_hold_every_axis() -> None:
    axes = {"round": np.array([0.0, 1.0]), "seconds": np.array([0.0, 0.123456789])}
    drawn = Curve("trainer 0", axes, np.array([2.5, 3.0]), np.array([1, 0])).points("loss")
    assert drawn == [
        {"series": "trainer 0", "round": 1, "seconds": 0.123457, "loss": 2.5},
        {"series": "trainer 0", "round": 0, "seconds": 0, "loss": 3},
    ]


def test_stretches_end_where_a_round_is_missing() -> None:
    assert stretches(np.array([0, 1, 3, 4, 7])) == [(0, 1), (3, 4), (7, 7)]
    assert stretches(np.array([], np.int64)) == []
