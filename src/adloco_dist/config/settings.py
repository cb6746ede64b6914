"""All settings of a run: types, units, defaults and the checks that need nothing but the settings.

Hydra composes the groups under conf/ onto `Settings`; `OmegaConf.to_object` then builds these dataclasses, and
each `__post_init__` refuses what cannot work. No torch here: a wrong setting is reported before anything heavy
is imported or any process group exists.
"""

from dataclasses import dataclass, field
from typing import Annotated

from adloco_dist.config.batching import MEASURED_REQUESTS, BatchingSettings, SwitchSettings
from adloco_dist.config.checkpointing import CheckpointSettings
from adloco_dist.config.choices import (
    BatchRequest,
    Concurrency,
    Device,
    Estimator,
    Final,
    InnerOptimizer,
    MergePolicy,
    Precision,
    RoundLength,
    WireFormat,
)
from adloco_dist.config.data import DataSettings
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.experiment import ModelSettings, PoolSettings
from adloco_dist.config.merging import MergeSettings
from adloco_dist.config.optimization import AlgorithmSettings, InnerSettings, OuterSettings
from adloco_dist.config.read_when import ON_A_GPU, SEVERAL_TRAINERS, ReadWhen
from adloco_dist.config.running import (
    BudgetSettings,
    ClusterSettings,
    EvaluationSettings,
    InstanceSettings,
    ProfileSettings,
    RunSettings,
    TrackingSettings,
)
from adloco_dist.config.simulation import SimulationSettings
from adloco_dist.config.wire import WireSettings


@dataclass
class Settings:
    """A run."""

    seed: int = 0
    """Seeds the initial weights, the shards' order and every random number of training."""
    precision: Precision = Precision.auto
    """bf16: fp32 weights under bf16 autocast. fp64: for exact comparisons. auto: bf16 on a GPU that computes in it,
    else fp32; weights are fp32 in both, so ranks may differ."""
    tf32: Annotated[bool, ReadWhen(ON_A_GPU, "precision!=fp64")] = False
    """Let matrix products in fp32 round their factors to TF32 (10 bits of mantissa) on GPUs that have it."""
    deterministic: bool = False
    """Take only those of torch's algorithms that give the same bits every time, which on a GPU are slower; operations
    that have none fail. (On a CPU, runs are the same bit by bit in any case.)"""
    final: Annotated[Final, ReadWhen(SEVERAL_TRAINERS)] = Final.best
    """What is saved at the end. best: the trainer with the smallest validation loss. average: the average of
    all trainers left."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    inner: InnerSettings = field(default_factory=InnerSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    switch: SwitchSettings = field(default_factory=SwitchSettings)
    merge: MergeSettings = field(default_factory=MergeSettings)
    budget: BudgetSettings = field(default_factory=lambda: BudgetSettings(rounds=20))
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    instances: InstanceSettings = field(default_factory=InstanceSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    simulation: SimulationSettings = field(default_factory=SimulationSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @property
    def measures_gradients(self) -> bool:
        """Whether the batch follows gradient statistics."""
        return self.batching.request in MEASURED_REQUESTS

    @property
    def measures_times(self) -> bool:
        """Whether a batch is weighed against what its computation takes."""
        return self.switch.n == "auto" or self.batching.request is BatchRequest.progress

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SettingsError.of("seed", self.seed, "must be >= 0")
        request = self.batching.request
        if self.algorithm.is_data_parallel:
            self._check_data_parallel()
        if self.pool.ranks_per_worker > 1:
            self._check_sharded()
        self._check_wire()
        merge, trainers = self.merge, self.pool.trainers
        if merge.policy is not MergePolicy.none:
            rule = f"must be <= pool.trainers={trainers}; lower it, or set merge=none"
            if merge.min_trainers > trainers:
                raise SettingsError.of("merge.min_trainers", merge.min_trainers, rule)
        concurrency = self.instances.concurrency
        if concurrency in (Concurrency.streams, Concurrency.threads):
            other = Device.cpu if concurrency is Concurrency.streams else Device.cuda
            rule = f"is unsupported with cluster.device={other.name}; use serial or auto"
            if self.cluster.device is other:
                raise SettingsError.of("instances.concurrency", concurrency, rule)
        if self.measures_gradients and self.batching.estimator is Estimator.workers:
            rule = "compares the gradients of several workers; set pool.workers_per_trainer >= 2, or use sketch"
            if self.pool.workers_per_trainer == 1:
                raise SettingsError.of("batching.estimator", self.batching.estimator, rule)
        rule = "weighs micro-batches against the measured noise scale; needs batching.request to be a variance test"
        if self.switch.n == "auto" and not self.measures_gradients:
            raise SettingsError.of("switch.n", self.switch.n, rule)
        if request is BatchRequest.replay:
            rule = "a budget in seconds does not say how many rounds are replayed; use budget.rounds or budget.tokens"
            if self.budget.seconds is not None:
                raise SettingsError.of("batching.request", request, rule)

    def _check_wire(self) -> None:
        wire = self.wire
        if self.algorithm.is_data_parallel and not wire.is_plain:
            rule = "algorithm=ddp averages gradients, at every update; use wire=fp32"
            raise SettingsError.of("wire.format", wire.format, rule)
        if self.algorithm.round is not RoundLength.link:  # which leaves fragments and delays their times
            self._check_times()
        if wire.format is WireFormat.sparse and self.outer.momentum:
            rule = "keeps what it has not sent, and an outer momentum would count that twice; set outer=average"
            raise SettingsError.of("wire.format", wire.format, rule)
        if wire.is_streaming and self.algorithm.round is RoundLength.seconds:
            rule = "varies the updates of a round, in which wire.fragments and wire.delay_updates have fixed times"
            raise SettingsError.of("algorithm.round", "seconds", f"{rule}; use speed, or whole averages")
        if wire.keeps_residual and self.outer.radial:
            rule = "restores lengths, which error feedback would count twice; choose one of them"
            raise SettingsError.of("outer.radial", self.outer.radial, rule)
        if wire.is_streaming and self.measures_gradients and self.batching.estimator is not Estimator.sketch:
            rule = "needs workers at one point, and wire.fragments or wire.delay_updates keep them apart; use sketch"
            raise SettingsError.of("batching.estimator", self.batching.estimator, rule)

    def _check_times(self) -> None:
        wire, updates = self.wire, self.algorithm.updates_per_round
        if wire.fragments > updates:
            rule = f"must be <= algorithm.updates_per_round={updates}: each has its own time in a round"
            raise SettingsError.of("wire.fragments", wire.fragments, rule)
        distance, delay = updates // wire.fragments, wire.delay_updates
        if delay is None:
            rule = "follows the link, as the updates of a round do then; set algorithm.round=link, or a number"
            raise SettingsError.of("wire.delay_updates", delay, rule)
        if delay >= distance:
            rule = f"must be < the {distance} updates between two averages"
            given = f"(algorithm.updates_per_round={updates}, wire.fragments={wire.fragments})"
            raise SettingsError.of("wire.delay_updates", delay, f"{rule} {given}")

    def _check_sharded(self) -> None:
        """What needs a worker's whole model on one device."""
        given = f"goes with pool.ranks_per_worker=1 alone, not {self.pool.ranks_per_worker}"
        if self.algorithm.is_data_parallel:
            raise SettingsError(f"algorithm=ddp: {given}; use another algorithm")
        if self.measures_gradients and self.batching.estimator is not Estimator.sketch:
            raise SettingsError.of("batching.estimator", self.batching.estimator, f"{given}; use sketch")
        if self.inner.optimizer is InnerOptimizer.muon:
            rule = f"{given}, for it needs whole matrices; use adamw or sgd"
            raise SettingsError.of("inner.optimizer", self.inner.optimizer, rule)
        for name, radial in (("outer.radial", self.outer.radial), ("merge.radial", self.merge.radial)):
            if radial:
                raise SettingsError.of(name, radial, f"{given}, for it needs the norms of whole tensors; leave it out")
        if self.instances.concurrency in (Concurrency.streams, Concurrency.threads):
            rule = f"{given}: ranks that compute a worker together take turns together; use serial"
            raise SettingsError.of("instances.concurrency", self.instances.concurrency, rule)
        if self.model.compile:
            raise SettingsError.of("model.compile", self.model.compile, f"{given}; leave it out")

    def _check_data_parallel(self) -> None:
        if self.algorithm.round is not RoundLength.updates:
            rule = "algorithm=ddp averages at every update; use updates"
            raise SettingsError.of("algorithm.round", self.algorithm.round, rule)
        trainers, concurrency = self.pool.trainers, self.instances.concurrency
        if trainers != 1:
            raise SettingsError.of("pool.trainers", trainers, "algorithm=ddp has one trainer; set pool.trainers=1")
        if self.measures_gradients:
            rule = "algorithm=ddp averages gradients before they can be compared; use none, ramp, staged or replay"
            raise SettingsError.of("batching.request", self.batching.request, rule)
        if concurrency not in (Concurrency.serial, Concurrency.auto):
            rule = "algorithm=ddp has one instance per rank; use serial"
            raise SettingsError.of("instances.concurrency", concurrency, rule)
        if self.model.compile:
            rule = "algorithm=ddp wraps the model itself; leave it out"
            raise SettingsError.of("model.compile", self.model.compile, rule)
