"""The choice of an estimator, by the setting `batching.estimator`."""

from adloco_dist.config import Estimator, Settings
from adloco_dist.round.estimators.per_sequence import PerSequenceEstimator
from adloco_dist.round.estimators.protocol import GradientEstimator
from adloco_dist.round.estimators.sketch import SketchEstimator
from adloco_dist.round.estimators.workers import WorkersEstimator


def new_estimator(settings: Settings) -> GradientEstimator:
    """The estimator of one trainer that the settings name."""
    match settings.batching.estimator:
        case Estimator.sketch:
            return SketchEstimator(settings)
        case Estimator.workers:
            return WorkersEstimator(settings)
        case Estimator.per_sequence:
            return PerSequenceEstimator(settings)
