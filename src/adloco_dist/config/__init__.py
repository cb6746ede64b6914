"""Typed settings, their checks, and the error that tells a user what is wrong."""

from adloco_dist.config.choices import (
    Algorithm as Algorithm,
    Backend as Backend,
    Corpus as Corpus,
    Device as Device,
    InnerOptimizer as InnerOptimizer,
    OuterState as OuterState,
    Placement as Placement,
    Precision as Precision,
    Schedule as Schedule,
    TrackingMode as TrackingMode,
)
from adloco_dist.config.errors import SettingsError as SettingsError
from adloco_dist.config.errors import require as require
from adloco_dist.config.settings import (
    AlgorithmSettings as AlgorithmSettings,
    BatchingSettings as BatchingSettings,
    BudgetSettings as BudgetSettings,
    ClusterSettings as ClusterSettings,
    DataSettings as DataSettings,
    EvaluationSettings as EvaluationSettings,
    InnerSettings as InnerSettings,
    ModelSettings as ModelSettings,
    OuterSettings as OuterSettings,
    PoolSettings as PoolSettings,
    RunSettings as RunSettings,
    Settings as Settings,
    TrackingSettings as TrackingSettings,
)
