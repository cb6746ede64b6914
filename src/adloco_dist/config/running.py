"""Where and with what records: evaluation, cluster, tracking, profile, run directory, checkpoints, simulated clock."""

import re
from dataclasses import dataclass
from typing import Annotated

from adloco_dist.config.amounts import Amount
from adloco_dist.config.choices import Backend, Concurrency, Device, TrackingMode, Unfinished
from adloco_dist.config.errors import require
from adloco_dist.config.marks import ON_A_GPU, Range, ReadWhen

IN_WANDB = ReadWhen("tracking.mode!=disabled")
SIMULATED = ReadWhen("simulation.update_seconds!=null")
MAX_SECONDS = 1_000_000
"""Maximum of a timeout, eleven days: libraries count timeouts in milliseconds of 32 bits."""
TIMEOUT = Range(f"in (0, {MAX_SECONDS}] seconds")
MAX_PORT = 65_535
THIS_MACHINE = "127.0.0.1"
"""The network address on which only programs of the same machine reach a server."""
LONGEST_PROJECT, NOT_IN_PROJECT = 128, "/\\#?%:"
"""What Weights & Biases takes as the name of a project."""


@dataclass
class EvaluationSettings:
    """When and on how much the anchors are evaluated."""

    every: str | None = "5%"
    """What passes between two evaluations of the anchors: a number of rounds, as in 5rounds, or a share of the budget,
    as in 5%, after which they are evaluated at the end of the next round. null: they are evaluated at the end alone."""
    sequences: Annotated[int, Range(">= 1")] = 32
    """Validation sequences of an evaluation while training, at most what the split holds."""
    final_sequences: Annotated[int | None, Range(">= 1")] = 256
    """The same for the evaluation at the end; null: the whole split."""

    @property
    def interval(self) -> Amount | None:
        """What passes between two evaluations, in rounds or in % of the budget."""
        return None if self.every is None else Amount.of("evaluation.every", self.every, ("rounds", "%"))

    def __post_init__(self) -> None:
        interval = self.interval
        self.every = None if interval is None else str(interval)
        is_possible = interval is None or interval.unit != "%" or interval.number <= 100
        require(is_possible, "evaluation.every", self.every, "must be at most 100%, of the budget")


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
    threads_per_rank: Annotated[int | None, Range(">= 1")] = None
    """CPU threads of a rank; null: the node's cores divided by its ranks. Where other programs compute on the same
    cores, leave them theirs: threads spin while they wait for each other, and one that has no core stops all."""
    memory_bytes: Annotated[int | None, Range(">= 1 byte"), ReadWhen("cluster.device!=cuda")] = None
    """Memory of a rank on a CPU for the pool and its micro-batches, may differ between nodes; null: what is available
    when the run starts, divided by the node's ranks."""
    timeout_seconds: Annotated[float, TIMEOUT] = 1800.0
    """Timeout of a control message, and of one exchange of tensors as a whole; must outlast the difference between the
    fastest and the slowest rank's round."""
    silence_seconds: Annotated[float, TIMEOUT] = 10.0
    """Seconds of silence after which a rank is taken for dead, and the run ends with its name; in a tenth of them it
    says that it lives. Raise it where links are interrupted for longer and the run should sit that out."""

    def __post_init__(self) -> None:
        is_possible = self.device is not Device.cpu or self.backend is not Backend.nccl
        require(is_possible, "cluster.backend", self.backend, "needs GPUs, but cluster.device=cpu; use gloo")


@dataclass
class InstanceSettings:
    """How the model instances of one rank share its device."""

    concurrency: Concurrency = Concurrency.serial
    """serial: in turn, each with the whole device. streams: at once, on CUDA streams of their own. threads: at once on
    a CPU, whose threads are divided. auto: the faster of what the device can, measured before the first round."""
    resident: Annotated[int | None, Range(">= 1"), ReadWhen(ON_A_GPU)] = None
    """Maximum number of instances whose weights and moments stay on a GPU; further ones wait in pinned CPU memory and
    are copied ahead of their turn. null: as many as fit (all, where they compute at once)."""

    def __post_init__(self) -> None:
        take_turns = self.concurrency not in (Concurrency.streams, Concurrency.threads)
        rule = f"instances that swap take turns; leave it out with instances.concurrency={self.concurrency.name}"
        require(self.resident is None or take_turns, "instances.resident", self.resident, rule)


@dataclass
class TrackingSettings:
    """Where curves go beside the run directory."""

    mode: TrackingMode = TrackingMode.auto
    """Mode of Weights & Biases. auto: online when the user is logged in, else offline; disabled: not used."""
    tensorboard: bool = False
    """Whether TensorBoard's files are written, into the folder `tensorboard` of the run directory."""
    project: Annotated[str, IN_WANDB] = "adloco_dist"
    """Name of the project in Weights & Biases."""
    group: Annotated[str | None, IN_WANDB] = None
    """Group of the run in Weights & Biases; null: none, or in a sweep the name of the sweep's folder."""

    def __post_init__(self) -> None:
        is_name = 0 < len(self.project) <= LONGEST_PROJECT and not set(self.project) & set(NOT_IN_PROJECT)
        rule = f"must be 1 to {LONGEST_PROJECT} characters, and none of {' '.join(NOT_IN_PROJECT)}"
        require(is_name, "tracking.project", self.project, rule)
        require(self.group != "", "tracking.group", self.group, "must have characters; write null for the default")


@dataclass
class ProfileSettings:
    """Which rounds run under torch's profiler (docs/guide/profiling.md)."""

    rounds: str | None = None
    """The first and the last of them, counted from 1 and both included, as in 3:5, or the number of one round. Every
    rank writes a trace of what it did in them to profile/ in the run directory. null: none."""

    @property
    def chosen(self) -> range:
        """The numbers of the rounds; raises a SettingsError where they cannot be read, or there are none."""
        if self.rounds is None:
            return range(0)
        rule = "must be the first and the last round to profile, counted from 1, as in 3:5, or one number"
        match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", self.rounds)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        require(1 <= first <= last, "profile.rounds", self.rounds, rule)
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
    replay: str | None = None
    """Run directory whose plans are taken, round by round, in place of new ones: a run with the same settings, data and
    ranks is then the same to the bit, whatever clocks say. null: rank 0 decides."""
    step_losses: bool = False
    """Whether metrics.jsonl has the loss of every update, and not of rounds alone (`step_losses`)."""
    report: bool = True
    """Whether a run that ends writes report.html and figures/ into its directory: what happened, to look at."""
    watch: str | None = None
    """Port of rank 0's node on which that page is shown while the run trains, at an address with a random token that
    is printed; 0: any that is free; null: none. For this machine alone, or with a network address before the port, as
    in 0.0.0.0:8080, for all that reach that."""

    @property
    def watch_address(self) -> tuple[str, int] | None:
        """The network address and the port of `watch`; raises a SettingsError where they are none."""
        if self.watch is None:
            return None
        address, _, port = self.watch.rpartition(":")
        is_port = re.fullmatch("[0-9]{1,5}", port) is not None and int(port) <= MAX_PORT
        rule = f"must be a port from 0 to {MAX_PORT}, an address and a port as in 0.0.0.0:8080, or null"
        require(is_port, "run.watch", self.watch, rule)
        return address.strip("[]") or THIS_MACHINE, int(port)

    def __post_init__(self) -> None:
        _ = self.watch_address


@dataclass
class CheckpointSettings:
    """When checkpoints are written; a stop request always writes one."""

    every: str | None = "10minutes"
    """What passes between two checkpoints, which are written when the round ends: minutes of rank 0's clock, a number
    of rounds, or tokens of the whole pool, as in 10minutes, 5rounds or 1e6tokens. null: none is written unless a stop
    is requested."""
    keep_last: Annotated[int, Range(">= 1")] = 2
    """Newest checkpoints that are kept: what is left to start from if the newest is damaged."""
    keep_every_rounds: Annotated[int | None, Range(">= 1")] = None
    """Checkpoints after a multiple of so many rounds are kept for ever; null: none is."""
    copies: bool = True
    """Where nodes have directories of their own: keep a copy of every part on another node. While a run trains, copies
    take a quarter of the measured link at most, and a checkpoint is whole when they have come."""

    @property
    def interval(self) -> Amount | None:
        """What passes between two checkpoints."""
        units = ("minutes", "rounds", "tokens")
        return None if self.every is None else Amount.of("checkpoint.every", self.every, units)

    def __post_init__(self) -> None:
        self.every = None if self.every is None else str(self.interval)


@dataclass
class SimulationSettings:
    """Seconds that are counted instead of measured, where `update_seconds` is set; every rank stands for a host."""

    update_seconds: Annotated[float | None, Range("> 0")] = None
    """Time of an update of one worker apart from its sequences; null: the real clock is read."""
    sequence_seconds: Annotated[float, SIMULATED, Range(">= 0 seconds")] = 0.0
    """Time of each sequence of an update."""
    bytes_per_second: Annotated[float | None, SIMULATED, Range("> 0")] = None
    """Rate of every host's link, in either direction; null: bytes take no time."""
    latency_seconds: Annotated[float, SIMULATED, Range(">= 0 seconds")] = 0.0005
    """Time of a message from one host to another, apart from its bytes."""
    average_seconds: Annotated[float, SIMULATED, Range(">= 0 seconds")] = 0.0
    """Time that a host computes for an average: differences, what travels of them, and the outer step."""

    @property
    def is_on(self) -> bool:
        return self.update_seconds is not None

    def transfer_seconds(self, num_bytes: int) -> float:
        """What these bytes take on a host's link, without latency."""
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
