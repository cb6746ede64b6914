"""Typed settings, their checks, and the error that says what is wrong with them."""

from adloco_dist.config.amounts import Amount
from adloco_dist.config.batching import BatchingSettings
from adloco_dist.config.choices import (
    Averages,
    Backend,
    BatchRequest,
    Concurrency,
    Corpus,
    Damaged,
    Device,
    Final,
    GradientNorm,
    InnerOptimizer,
    MergePolicy,
    OuterState,
    Packing,
    Placement,
    Precision,
    RateScaling,
    RoundLength,
    Schedule,
    Shards,
    TrackingMode,
    Unfinished,
    Unmeasured,
    WireFormat,
)
from adloco_dist.config.data import OF_ROWS, DataSettings
from adloco_dist.config.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, SettingsError, refused, require
from adloco_dist.config.experiment import MergeSettings, ModelSettings, PoolSettings
from adloco_dist.config.optimization import AlgorithmSettings, InnerSettings, OuterSettings, WireSettings
from adloco_dist.config.running import (
    CheckpointSettings,
    ClusterSettings,
    EvaluationSettings,
    RunSettings,
    SimulationSettings,
    TrackingSettings,
)
from adloco_dist.config.settings import Settings
