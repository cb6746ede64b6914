"""All settings of a run: types, units, defaults and the checks that need nothing but the settings.

Hydra composes the groups under conf/ onto `Settings`; `OmegaConf.to_object` then builds these dataclasses, whose
`__post_init__` refuses what cannot work, before torch is imported or any process group exists.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import adloco_dist.config.running as running
from adloco_dist.config.amounts import Amount
from adloco_dist.config.batching import BatchingSettings
from adloco_dist.config.choices import BatchRequest, Final, Precision, RoundLength, WireFormat
from adloco_dist.config.data import DataSettings
from adloco_dist.config.errors import SettingsError, require
from adloco_dist.config.experiment import MergeSettings, ModelSettings, PoolSettings
from adloco_dist.config.marks import ON_A_GPU, SEVERAL_TRAINERS, Range, ReadWhen, check_ranges
from adloco_dist.config.optimization import AlgorithmSettings, InnerSettings, OuterSettings, WireSettings


@dataclass
class Settings:
    """A run."""

    seed: Annotated[int, Range(">= 0")] = 0
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
    """What is saved at the end. best: the trainer with the smallest validation loss. average: the mean of all."""
    budget: str = "1_200_000tokens"
    """When training ends: after a number of rounds, of tokens of the whole pool (the last round ends with the update
    that reaches them), of seconds of rank 0's clock, counted from the first round on, or of epochs, passes of the whole
    pool over the training data; as in 20rounds, 1.2e6tokens, 120seconds or 1epoch."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    inner: InnerSettings = field(default_factory=InnerSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    merge: MergeSettings = field(default_factory=MergeSettings)
    evaluation: running.EvaluationSettings = field(default_factory=running.EvaluationSettings)
    checkpoint: running.CheckpointSettings = field(default_factory=running.CheckpointSettings)
    instances: running.InstanceSettings = field(default_factory=running.InstanceSettings)
    cluster: running.ClusterSettings = field(default_factory=running.ClusterSettings)
    simulation: running.SimulationSettings = field(default_factory=running.SimulationSettings)
    tracking: running.TrackingSettings = field(default_factory=running.TrackingSettings)
    profile: running.ProfileSettings = field(default_factory=running.ProfileSettings)
    run: running.RunSettings = field(default_factory=running.RunSettings)

    @property
    def budget_amount(self) -> Amount:
        """The budget as a number and a unit."""
        return Amount.of("budget", self.budget, ("rounds", "tokens", "seconds", "epochs"))

    def __post_init__(self) -> None:
        self.budget = str(self.budget_amount)
        for name, section in sections(self).items():
            check_ranges(name, section)
        if self.algorithm.is_data_parallel:
            self._check_data_parallel()
        if self.algorithm.round is not RoundLength.link:  # which leaves fragments and delays their times
            self._check_times()
        self._check_combinations()

    def _check_combinations(self) -> None:
        batching, wire = self.batching, self.wire
        is_sharded = self.pool.ranks_per_worker > 1
        rule = "algorithm=ddp and pool.ranks_per_worker > 1 wrap the model themselves; leave it out"
        is_wrapped = self.algorithm.is_data_parallel or is_sharded
        require(not (self.model.compile and is_wrapped), "model.compile", self.model.compile, rule)
        rule = "keeps what it has not sent, and an outer momentum would count that twice; set outer=average"
        is_counted_once = not (wire.keeps_residual and self.outer.momentum)
        require(is_counted_once, "wire.format", wire.format, rule)
        rule = "weighs micro-batches against the measured noise scale; needs batching.request to be a variance test"
        is_known = batching.switch_n != "auto" or batching.measures_gradients
        require(is_known, "batching.switch_n", batching.switch_n, rule)
        rule = "a budget in seconds does not say how many rounds are replayed; give it in rounds or tokens"
        is_counted = batching.request is not BatchRequest.replay or self.budget_amount.unit != "seconds"
        require(is_counted, "batching.request", batching.request, rule)

    def _check_times(self) -> None:
        """Rounds of so many updates must have room for the averages that begin and end in them."""
        wire, updates = self.wire, self.algorithm.updates_per_round
        rule = f"must be <= algorithm.updates_per_round={updates}: each has its own time in a round"
        require(wire.fragments <= updates, "wire.fragments", wire.fragments, rule)
        distance, delay = updates // wire.fragments, wire.delay_updates
        if delay is None:
            rule = "follows the link, as the updates of a round do then; set algorithm.round=link, or a number"
            raise SettingsError.of("wire.delay_updates", delay, rule)
        rule = f"must be < the {distance} updates between two averages"
        given = f"(algorithm.updates_per_round={updates}, wire.fragments={wire.fragments})"
        require(delay < distance, "wire.delay_updates", delay, f"{rule} {given}")

    def _check_data_parallel(self) -> None:
        algorithm, pool, batching = self.algorithm, self.pool, self.batching
        is_equal, rule = algorithm.round is RoundLength.updates, "algorithm=ddp averages at every update; use updates"
        require(is_equal, "algorithm.round", algorithm.round, rule)
        given = f"pool.trainers={pool.trainers}, pool.ranks_per_worker={pool.ranks_per_worker}"
        if (pool.trainers, pool.ranks_per_worker) != (1, 1):
            raise SettingsError(f"{given}: algorithm=ddp has one trainer, and whole models on its ranks; set both to 1")
        rule = "algorithm=ddp averages gradients before they can be compared; use none, ramp, staged or replay"
        require(not batching.measures_gradients, "batching.request", batching.request, rule)
        rule = "algorithm=ddp averages gradients, at every update; use wire=fp32"
        is_plain = self.wire.format is WireFormat.fp32 and not self.wire.is_streaming
        require(is_plain, "wire.format", self.wire.format, rule)


def sections(settings: Settings) -> dict[str, Any]:
    """The sections of settings by name; the settings of the top level have none, ""."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {"": settings, **{name: value for name, value in values.items() if is_dataclass(value)}}


def setting_names() -> list[str]:
    """Every setting by its dotted name."""
    return [
        f"{name}.{field.name}".removeprefix(".")
        for name, section in sections(Settings()).items()
        for field in fields(section)
        if not is_dataclass(getattr(section, field.name))
    ]
