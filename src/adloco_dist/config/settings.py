"""All settings of a run: types, units, defaults and the checks that need nothing but the settings.

Hydra composes the groups under conf/ onto `Settings`; `OmegaConf.to_object` then builds these dataclasses, and
each `__post_init__` refuses what cannot work. No torch here: a wrong setting is reported before anything heavy
is imported or any process group exists.
"""

from dataclasses import dataclass, field

from adloco_dist.config.batching import MEASURED_REQUESTS, BatchingSettings, SwitchSettings
from adloco_dist.config.checkpointing import CheckpointSettings
from adloco_dist.config.choices import (
    Algorithm,
    BatchRequest,
    Concurrency,
    Device,
    Estimator,
    Final,
    MergePolicy,
    Precision,
)
from adloco_dist.config.data import DataSettings
from adloco_dist.config.errors import require
from adloco_dist.config.experiment import ModelSettings, PoolSettings
from adloco_dist.config.merging import MergeSettings
from adloco_dist.config.optimization import AlgorithmSettings, InnerSettings, OuterSettings
from adloco_dist.config.running import (
    BudgetSettings,
    ClusterSettings,
    EvaluationSettings,
    InstanceSettings,
    RunSettings,
    TrackingSettings,
)


@dataclass
class Settings:
    """A run."""

    seed: int = 0
    """Seeds the initial weights, the shards' order and every random number of training."""
    precision: Precision = Precision.auto
    """bf16: fp32 weights under bf16 autocast. fp64: for exact comparisons. auto: bf16 on a GPU that computes in it,
    else fp32; weights are fp32 in both, so ranks may differ."""
    tf32: bool = False
    """Let matrix products in fp32 round their factors to TF32 (10 bits of mantissa) on GPUs that have it."""
    deterministic: bool = False
    """Take only those of torch's algorithms that give the same bits every time, which on a GPU are slower; operations
    that have none fail. (On a CPU, runs are the same bit by bit in any case.)"""
    final: Final = Final.best
    """What is saved at the end. best: the trainer with the smallest validation loss. average: of all trainers left."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    inner: InnerSettings = field(default_factory=InnerSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    switch: SwitchSettings = field(default_factory=SwitchSettings)
    merge: MergeSettings = field(default_factory=MergeSettings)
    budget: BudgetSettings = field(default_factory=lambda: BudgetSettings(rounds=20))
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    instances: InstanceSettings = field(default_factory=InstanceSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @property
    def measures_gradients(self) -> bool:
        """Whether the batch follows gradient statistics."""
        return self.batching.request in MEASURED_REQUESTS

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "must be >= 0")
        request = self.batching.request
        if self.algorithm.name is Algorithm.ddp:
            trainers = self.pool.trainers
            require(trainers == 1, "pool.trainers", trainers, "algorithm=ddp has one trainer; set pool.trainers=1")
            rule = "algorithm=ddp averages gradients before they can be compared; use none, ramp, staged or replay"
            require(not self.measures_gradients, "batching.request", request, rule)
        merge, trainers = self.merge, self.pool.trainers
        if merge.policy is not MergePolicy.none:
            rule = f"must be <= pool.trainers={trainers}; lower it, or set merge=none"
            require(merge.min_trainers <= trainers, "merge.min_trainers", merge.min_trainers, rule)
        concurrency = self.instances.concurrency
        if concurrency in (Concurrency.streams, Concurrency.threads):
            other = Device.cpu if concurrency is Concurrency.streams else Device.cuda
            rule = f"cannot be had with cluster.device={other.name}; use serial or auto"
            require(self.cluster.device is not other, "instances.concurrency", concurrency, rule)
            rule = "algorithm=ddp has one instance per rank; use serial"
            require(self.algorithm.name is not Algorithm.ddp, "instances.concurrency", concurrency, rule)
        if self.measures_gradients and self.batching.estimator is Estimator.workers:
            rule = "compares the gradients of several workers; set pool.workers_per_trainer >= 2, or use sketch"
            require(self.pool.workers_per_trainer != 1, "batching.estimator", self.batching.estimator, rule)
        exact = self.measures_gradients and self.batching.estimator is Estimator.per_sequence
        rule = "batching.estimator=per_sequence differentiates sequence by sequence (torch.func); use sketch"
        checkpointing = self.model.gradient_checkpointing
        require(not (exact and checkpointing), "model.gradient_checkpointing", checkpointing, rule)
        rule = "differentiates sequence by sequence (torch.func), which attention masks do not allow; use sketch"
        require(not (exact and self.data.is_labelled), "batching.estimator", self.batching.estimator, rule)
        rule = "algorithm=ddp wraps the model itself; leave it out"
        compiled = self.model.compile and self.algorithm.name is Algorithm.ddp
        require(not compiled, "model.compile", self.model.compile, rule)
        rule = "weighs passes against the measured noise scale; needs batching.request to be a variance test"
        require(self.switch.n != "auto" or self.measures_gradients, "switch.n", self.switch.n, rule)
        if request is BatchRequest.replay:
            rule = "a budget in seconds does not say how many rounds are replayed; use budget.rounds or budget.tokens"
            require(self.budget.seconds is None, "batching.request", request, rule)
