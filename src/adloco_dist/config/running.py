"""How long, where and with what records: budget, evaluation, cluster, tracking, profile, run directory."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from adloco_dist.config.choices import Backend, Concurrency, Device, TrackingMode, Unfinished
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ON_A_GPU, ReadWhen

IN_WANDB = ReadWhen("tracking.mode!=disabled")

MAX_SECONDS = 1_000_000
"""Maximum of a timeout, eleven days: libraries count timeouts in milliseconds of 32 bits."""
MAX_PORT = 65_535
LONGEST_PROJECT, LONGEST_TAG, NOT_IN_PROJECT = 128, 64, "/\\#?%:"
"""What Weights & Biases takes as names."""


@dataclass
class BudgetSettings:
    """When training ends: exactly one is set."""

    rounds: int | None = None
    """Rounds of the run, > 0."""
    tokens: int | None = None
    """Tokens of the whole pool; the last round ends with the update that reaches them."""
    seconds: float | None = None
    """Seconds of rank 0's clock, from the first round on."""
    epochs: float | None = None
    """Passes of the whole pool over the training data, counted in tokens."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            shown = ", ".join(f"budget.{name}={value}" for name, value in given.items()) or "budget.*=null"
            raise SettingsError(
                f"{shown}: set exactly one of budget.rounds, budget.tokens, budget.seconds, budget.epochs"
            )
        for name, value in given.items():
            if not value > 0:
                raise SettingsError.of(f"budget.{name}", value, "must be > 0")


@dataclass
class EvaluationSettings:
    """When and on how much the anchors are evaluated."""

    every_rounds: int | None = None
    """Rounds between two evaluations of the anchors; null: they are not counted."""
    every_fraction: float | None = 0.05
    """Share of the budget, in (0, 1], after which anchors are evaluated at the end of the next round. With null, too:
    only at the end."""
    sequences: int = 64
    """Validation sequences of an evaluation while training, at most what the split holds."""
    final_sequences: int | None = 512
    """The same for the evaluation at the end; null: the whole split."""
    batch: int = 16
    """Sequences per forward pass of an evaluation."""

    @property
    def draws_curves(self) -> bool:
        """Whether anchors are evaluated while training."""
        return self.every_rounds is not None or self.every_fraction is not None

    def __post_init__(self) -> None:
        every = self.every_rounds
        if every is not None and every < 1:
            raise SettingsError.of("evaluation.every_rounds", every, "must be >= 1, or null")
        fraction = self.every_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise SettingsError.of("evaluation.every_fraction", fraction, "must be in (0, 1], of the budget, or null")
        if self.sequences < 1:
            raise SettingsError.of("evaluation.sequences", self.sequences, "must be >= 1")
        final = self.final_sequences
        if final is not None and final < 1:
            raise SettingsError.of("evaluation.final_sequences", final, "must be >= 1, or null for all")
        if self.batch < 1:
            raise SettingsError.of("evaluation.batch", self.batch, "must be >= 1")


@dataclass
class ClusterSettings:
    """Devices, backend and timeouts."""

    device: Device = Device.auto
    """auto: a GPU where the rank has one, else the CPU."""
    backend: Backend = Backend.auto
    """Backend for tensors. auto: nccl where every rank has a GPU of its own, else gloo. Control messages always travel
    over gloo, and so do averages beside updates (wire.delay_updates) of workers on several ranks."""
    interface: str | None = None
    """Network interface that gloo (and NCCL's sockets) use, may differ between nodes; null: what GLOO_SOCKET_IFNAME
    names, else, on several nodes, the one that leads to the rendezvous."""
    check_links: bool = True
    """Measure latency and bandwidth of every pair of nodes before training, one pair after the other."""
    threads_per_rank: int | None = None
    """CPU threads of a rank; null: the node's cores divided by its ranks. Where other programs compute on the same
    cores, leave them theirs: threads spin while they wait for each other, and one that has no core stops all."""
    memory_bytes: Annotated[int | None, ReadWhen("cluster.device!=cuda")] = None
    """Memory of a rank on a CPU for the pool and its micro-batches, may differ between nodes; null: what is available
    when the run starts, divided by the node's ranks."""
    control_seconds: float = 1800.0
    """Timeout of control messages; must outlast the difference between the fastest and slowest rank's round, and a
    whole round where ranks can be left without workers (merge.released_workers=retire)."""
    outer_seconds: float = 600.0
    """Timeout of one exchange of tensors, in an outer step or a merge, as a whole."""
    heartbeat_seconds: float = 1.0
    """Seconds between two messages in which a rank says that it lives, and where it stands."""
    silence_seconds: float = 10.0
    """Seconds of silence after which a rank is taken for dead, and the run ends with its name. Raise it where links
    are interrupted for longer and the run should sit that out."""
    max_communicators: int | None = None
    """Maximum number of process groups for tensors that a rank is in at one time, beside the control plane: the one
    unused for longest is released, and formed again when needed. null: 8 with nccl (each takes over half a GB), any
    number with gloo."""

    def __post_init__(self) -> None:
        for name in ("control_seconds", "outer_seconds", "heartbeat_seconds", "silence_seconds"):
            value, rule = getattr(self, name), f"must be > 0 seconds, and at most {MAX_SECONDS:,}"
            if not 0 < value <= MAX_SECONDS:
                raise SettingsError.of(f"cluster.{name}", value, rule)
        rule = f"must be at least three heartbeats of cluster.heartbeat_seconds={self.heartbeat_seconds}"
        enough = self.silence_seconds >= 3 * self.heartbeat_seconds
        if not enough:
            raise SettingsError.of("cluster.silence_seconds", self.silence_seconds, rule)
        threads = self.threads_per_rank
        if threads is not None and threads < 1:
            raise SettingsError.of("cluster.threads_per_rank", threads, "must be >= 1, or null")
        memory = self.memory_bytes
        if memory is not None and memory < 1:
            raise SettingsError.of("cluster.memory_bytes", memory, "must be >= 1 byte, or null")
        maximum = self.max_communicators
        if maximum is not None and maximum < 1:
            raise SettingsError.of("cluster.max_communicators", maximum, "must be >= 1, or null")
        impossible = self.device is Device.cpu and self.backend is Backend.nccl
        if impossible:
            raise SettingsError.of("cluster.backend", self.backend, "needs GPUs, but cluster.device=cpu; use gloo")


@dataclass
class InstanceSettings:
    """How the model instances of one rank share its device."""

    concurrency: Concurrency = Concurrency.serial
    """serial: in turn, each with the whole device. streams: at once, on CUDA streams of their own. threads: at once on
    a CPU, whose threads are divided. auto: the faster of what the device can, measured before the first round."""
    resident: Annotated[int | None, ReadWhen(ON_A_GPU)] = None
    """Maximum number of instances whose weights and moments stay on a GPU; further ones wait in pinned CPU memory and
    are copied ahead of their turn. null: as many as fit (all, where they compute at once)."""

    def __post_init__(self) -> None:
        resident = self.resident
        if resident is not None and resident < 1:
            raise SettingsError.of("instances.resident", resident, "must be >= 1, or null")
        concurrent = self.concurrency in (Concurrency.streams, Concurrency.threads)
        rule = f"instances that swap take turns; leave it out with instances.concurrency={self.concurrency.name}"
        if resident is not None and concurrent:
            raise SettingsError.of("instances.resident", resident, rule)


@dataclass
class TrackingSettings:
    """Where curves go beside the run directory."""

    mode: TrackingMode = TrackingMode.auto
    """Mode of Weights & Biases. auto: online when the user is logged in, else offline; disabled: not used."""
    tensorboard: bool = False
    """Whether TensorBoard's files are written, into the folder `tensorboard` of the run directory."""
    project: Annotated[str, IN_WANDB] = "adloco_dist"
    """Name of the project in Weights & Biases."""
    name: Annotated[str | None, IN_WANDB] = None
    """Name of the run in Weights & Biases; null: that of the run directory."""
    group: Annotated[str | None, IN_WANDB] = None
    """Group of the run in Weights & Biases; null: none, or in a sweep the name of the sweep's folder."""
    tags: Annotated[list[str], IN_WANDB] = field(default_factory=list)
    """Tags of the run in Weights & Biases."""
    patience_seconds: Annotated[float, IN_WANDB, ReadWhen("tracking.tensorboard=true")] = 60.0
    """Seconds that Weights & Biases and TensorBoard may each take when training has ended; then they are ended."""

    def __post_init__(self) -> None:
        rule = f"must be 1 to {LONGEST_PROJECT} characters, and none of {' '.join(NOT_IN_PROJECT)}"
        if not 0 < len(self.project) <= LONGEST_PROJECT or any(one in self.project for one in NOT_IN_PROJECT):
            raise SettingsError.of("tracking.project", self.project, rule)
        for name, value in (("tracking.name", self.name), ("tracking.group", self.group)):
            if value == "":
                raise SettingsError.of(name, value, "must have characters; write null for the default")
        for tag in self.tags:
            if not 0 < len(tag) <= LONGEST_TAG:
                raise SettingsError.of("tracking.tags", tag, f"a tag must have 1 to {LONGEST_TAG} characters")
        seconds = self.patience_seconds
        if not 0 < seconds <= MAX_SECONDS:
            rule = f"must be > 0 seconds, and at most {MAX_SECONDS:,}"
            raise SettingsError.of("tracking.patience_seconds", seconds, rule)


@dataclass
class ProfileSettings:
    """Which rounds run under torch's profiler (docs/guide/profiling.md)."""

    rounds: str | None = None
    """The first and the last of them, counted from 1 and both included, as in 3:5, or the number of one round. Every
    rank writes a trace of what it did in them to profile/ in the run directory. null: none."""

    @property
    def chosen(self) -> range:
        """The numbers of the rounds.

        Raises:
            SettingsError: they cannot be read, or there are none from the first to the last.
        """
        if self.rounds is None:
            return range(0)
        rule = "must be the first and the last round to profile, counted from 1, as in 3:5, or one number"
        found = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", self.rounds)
        if found is None:
            raise SettingsError.of("profile.rounds", self.rounds, rule)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last:
            raise SettingsError.of("profile.rounds", self.rounds, rule)
        return range(first, last + 1)

    def __post_init__(self) -> None:
        _ = self.chosen


@dataclass
class RunSettings:
    """Where the run directory is, what is recorded of updates, how a run is asked to stop, and who may look at it."""

    directory: str | None = None
    """The run directory; null: a new one under `root`, named by date and time."""
    root: Annotated[str, ReadWhen("run.directory=null")] = "runs"
    """Folder in which a run or sweep that names no directory makes a new one."""
    unfinished: Annotated[Unfinished, ReadWhen("run.directory!=null")] = Unfinished.refuse
    """When `directory` holds a run that has not ended. resume: training resumes from its newest whole
    checkpoint. archive: it is renamed, and the run starts from the beginning."""
    stop_file: str | None = None
    """When this file appears, on any node, all ranks stop, a checkpoint is written, and the exit code is 75; null:
    `stop` in the run directory."""
    step_losses: bool = False
    """Whether metrics.jsonl has the loss of every update, and not of rounds alone (`step_losses`)."""
    report: bool = True
    """Whether a run that ends writes report.html and figures/ into its directory: what happened, to look at."""
    watch: int | None = None
    """Port of rank 0's node on which that page is shown while the run trains, at an address with a random token that
    is printed; 0: any that is free; null: none."""
    watch_address: Annotated[str, ReadWhen("run.watch!=null")] = "127.0.0.1"
    """Network address on which `watch` listens. 127.0.0.1: for this machine alone; 0.0.0.0: for all that reach it."""

    def __post_init__(self) -> None:
        watch = self.watch
        if watch is not None and not 0 <= watch <= MAX_PORT:
            raise SettingsError.of("run.watch", watch, f"must be a port from 0 to {MAX_PORT}, or null")
