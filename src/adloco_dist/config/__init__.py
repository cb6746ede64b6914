"""Typed settings, their checks, and the error that tells a user what is wrong."""

from adloco_dist.config.batching import (
    MEASURED_REQUESTS,
    BatchingSettings,
    SwitchSettings,
)
from adloco_dist.config.choices import (
    Algorithm,
    Backend,
    BatchRequest,
    Corpus,
    Device,
    Estimator,
    GradientNorm,
    InnerOptimizer,
    OuterState,
    Placement,
    Precision,
    RateScaling,
    Schedule,
    SwitchMode,
    TrackingMode,
    Unmeasured,
)
from adloco_dist.config.errors import (
    EXIT_USER_ERROR,
    SettingsError,
    require,
    told_in_one_line,
)
from adloco_dist.config.experiment import (
    DataSettings,
    ModelSettings,
    PoolSettings,
)
from adloco_dist.config.optimization import (
    AlgorithmSettings,
    InnerSettings,
    OuterSettings,
)
from adloco_dist.config.running import (
    BudgetSettings,
    ClusterSettings,
    EvaluationSettings,
    RunSettings,
    TrackingSettings,
)
from adloco_dist.config.settings import (
    Settings,
)

__all__ = [
    "EXIT_USER_ERROR",
    "MEASURED_REQUESTS",
    "Algorithm",
    "AlgorithmSettings",
    "Backend",
    "BatchRequest",
    "BatchingSettings",
    "BudgetSettings",
    "ClusterSettings",
    "Corpus",
    "DataSettings",
    "Device",
    "Estimator",
    "EvaluationSettings",
    "GradientNorm",
    "InnerOptimizer",
    "InnerSettings",
    "ModelSettings",
    "OuterSettings",
    "OuterState",
    "Placement",
    "PoolSettings",
    "Precision",
    "RateScaling",
    "RunSettings",
    "Schedule",
    "Settings",
    "SettingsError",
    "SwitchMode",
    "SwitchSettings",
    "TrackingMode",
    "TrackingSettings",
    "Unmeasured",
    "require",
    "told_in_one_line",
]
