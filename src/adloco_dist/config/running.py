"""How long, where and with what records: budget, evaluation, cluster, tracking, run directory."""

from dataclasses import dataclass

from adloco_dist.config.choices import Backend, Concurrency, Device, TrackingMode, Unfinished
from adloco_dist.config.errors import SettingsError, require

MOST_SECONDS = 1_000_000
"""Of a timeout: eleven days. Libraries count them in milliseconds of 32 bits."""


@dataclass
class BudgetSettings:
    """When training ends: exactly one is set."""

    rounds: int | None = None
    tokens: int | None = None
    """Tokens of the whole pool; the last round ends with the update that reaches them."""
    seconds: float | None = None
    """Of rank 0's clock, from the first round on."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            shown = ", ".join(f"budget.{name}={value}" for name, value in given.items()) or "budget.*=null"
            raise SettingsError(f"{shown}: set exactly one of budget.rounds, budget.tokens, budget.seconds")
        for name, value in given.items():
            require(value > 0, f"budget.{name}", value, "must be > 0")


@dataclass
class EvaluationSettings:
    """When and on how much the anchors are evaluated."""

    every_rounds: int | None = 5
    """Rounds between two evaluations of the anchors; null: only at the end."""
    sequences: int = 64
    """Validation sequences of an evaluation while training, at most what the split holds."""
    final_sequences: int | None = 512
    """The same for the evaluation at the end; null: the whole split."""
    batch: int = 16
    """Sequences per forward pass of an evaluation."""

    def __post_init__(self) -> None:
        every = self.every_rounds
        require(every is None or every >= 1, "evaluation.every_rounds", every, "must be >= 1, or null")
        require(self.sequences >= 1, "evaluation.sequences", self.sequences, "must be >= 1")
        final = self.final_sequences
        require(final is None or final >= 1, "evaluation.final_sequences", final, "must be >= 1, or null for all")
        require(self.batch >= 1, "evaluation.batch", self.batch, "must be >= 1")


@dataclass
class ClusterSettings:
    """Devices, backend and timeouts."""

    device: Device = Device.auto
    """auto: a GPU where the rank has one, else the CPU."""
    backend: Backend = Backend.auto
    """For tensors. auto: nccl on GPUs of their own, else gloo. Control messages always travel over gloo."""
    interface: str | None = None
    """Network interface that gloo (and NCCL's sockets) use, may differ between nodes; null: what GLOO_SOCKET_IFNAME
    names, else, on several nodes, the one that leads to the rendezvous."""
    check_links: bool = True
    """Measure latency and bandwidth of every pair of nodes before training, one pair after the other."""
    threads_per_rank: int | None = None
    """CPU threads of a rank; null: the node's cores divided by its ranks."""
    memory_bytes: int | None = None
    """On a CPU: memory of a rank for the pool and its passes, may differ between nodes; null: what is available when
    the run starts, divided by the node's ranks."""
    control_seconds: float = 1800.0
    """Timeout of control messages; must outlast the difference between the fastest and slowest rank's round, and a
    whole round where ranks can be left without workers (merge.freed=retire)."""
    outer_seconds: float = 600.0
    """Timeout of one exchange of tensors, in an outer step or a merge, as a whole."""
    heartbeat_seconds: float = 1.0
    """Every rank says so often that it lives, and where it stands."""
    silence_seconds: float = 10.0
    """A rank that is silent for so long is taken for dead, and the run ends with its name. Raise it where links are
    interrupted for longer and the run should sit that out."""
    max_communicators: int | None = None
    """Most process groups for tensors that a rank is in at one time, beside the control plane: the least recently
    used is released and formed again when needed. null: 8 with nccl (each takes over half a GB), any number with gloo.
    """

    def __post_init__(self) -> None:
        for name in ("control_seconds", "outer_seconds", "heartbeat_seconds", "silence_seconds"):
            value, rule = getattr(self, name), f"must be > 0 seconds, and at most {MOST_SECONDS:,}"
            require(0 < value <= MOST_SECONDS, f"cluster.{name}", value, rule)
        rule = f"must be at least three heartbeats of cluster.heartbeat_seconds={self.heartbeat_seconds}"
        enough = self.silence_seconds >= 3 * self.heartbeat_seconds
        require(enough, "cluster.silence_seconds", self.silence_seconds, rule)
        threads = self.threads_per_rank
        require(threads is None or threads >= 1, "cluster.threads_per_rank", threads, "must be >= 1, or null")
        memory = self.memory_bytes
        require(memory is None or memory >= 1, "cluster.memory_bytes", memory, "must be >= 1 byte, or null")
        most = self.max_communicators
        require(most is None or most >= 1, "cluster.max_communicators", most, "must be >= 1, or null")
        impossible = self.device is Device.cpu and self.backend is Backend.nccl
        require(not impossible, "cluster.backend", self.backend, "needs GPUs, but cluster.device=cpu; use gloo")


@dataclass
class InstanceSettings:
    """How the model instances of one rank share its device."""

    concurrency: Concurrency = Concurrency.serial
    """serial: in turn, each with the whole device. streams: at once, on CUDA streams of their own. threads: at once on
    a CPU, whose threads are divided. auto: the faster of what the device can, measured before the first round."""
    resident: int | None = None
    """Instances whose weights and moments stay on a GPU at most; those beyond wait in pinned CPU memory and are copied
    ahead of their turn. null: as many as fit (all, where they compute at once)."""

    def __post_init__(self) -> None:
        resident = self.resident
        require(resident is None or resident >= 1, "instances.resident", resident, "must be >= 1, or null")
        at_once = self.concurrency in (Concurrency.streams, Concurrency.threads)
        rule = f"instances that swap take turns; leave it out with instances.concurrency={self.concurrency.name}"
        require(resident is None or not at_once, "instances.resident", resident, rule)


@dataclass
class TrackingSettings:
    """Where records go beside the run directory."""

    mode: TrackingMode = TrackingMode.auto
    """Weights & Biases. auto: online when the user is logged in, else offline; disabled: not used."""
    project: str = "adloco_dist"


@dataclass
class RunSettings:
    """Where the run directory is, and how a run is asked to stop."""

    directory: str | None = None
    """The run directory; null: a new one under `root`, named by date and time."""
    root: str = "runs"
    unfinished: Unfinished = Unfinished.refuse
    """When `directory` holds a run that has not ended. resume: it goes on from its newest whole checkpoint. set_aside:
    it is renamed, and the run begins anew."""
    stop_file: str | None = None
    """When this file appears, on any node, all ranks stop, a checkpoint is written, and the exit code is 75; null:
    `stop` in the run directory."""
