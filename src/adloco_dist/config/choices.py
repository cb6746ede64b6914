"""The settings that name one of a few ways, as enums: Hydra then refuses every other word."""

from enum import Enum


class Precision(Enum):
    """The precision of weights and arithmetic."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp64 = "fp64"


class Placement(Enum):
    """How a trainer's workers are dealt to nodes."""

    pack = "pack"
    spread = "spread"


class OuterState(Enum):
    """Where anchors, outer momentum and averages of anchors live."""

    device = "device"
    cpu = "cpu"


class Averages(Enum):
    """What a trainer's workers average."""

    pseudo_gradients = "pseudo_gradients"
    gradients = "gradients"


class WireFormat(Enum):
    """What pseudo-gradients travel as."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"
    sparse = "sparse"


class RoundLength(Enum):
    """What a round's number of updates is counted by."""

    updates = "updates"
    speed = "speed"
    seconds = "seconds"
    link = "link"

    @property
    def is_unequal(self) -> bool:
        """Whether ranks that differ in speed take different numbers of updates."""
        return self in (RoundLength.speed, RoundLength.seconds)


class InnerOptimizer(Enum):
    """The optimizer of every worker."""

    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"


class Schedule(Enum):
    """The schedule of the inner learning rate."""

    constant = "constant"
    cosine = "cosine"


class Corpus(Enum):
    """Where the text comes from."""

    python_stdlib = "python_stdlib"
    python_packages = "python_packages"
    text = "text"
    json = "json"
    parquet = "parquet"
    csv = "csv"
    hub = "hub"
    tokens = "tokens"


class Packing(Enum):
    """How documents become sequences."""

    packed = "packed"
    document = "document"


class Damaged(Enum):
    """What is done with rows that cannot be read, and with a file that cannot be read to its end."""

    refuse = "refuse"
    skip = "skip"


class Nulls(Enum):
    """What is done with rows that have no text, or no label where there must be one."""

    refuse = "refuse"
    skip = "skip"


class Device(Enum):
    """The device of every rank."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Backend(Enum):
    """The backend of the process groups that carry tensors."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class TrackingMode(Enum):
    """The mode of Weights & Biases."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class BatchRequest(Enum):
    """What asks for a batch."""

    norm_test = "norm_test"
    inner_product_test = "inner_product_test"
    augmented_inner_product_test = "augmented_inner_product_test"
    progress = "progress"
    none = "none"
    ramp = "ramp"
    staged = "staged"
    replay = "replay"


class GradientNorm(Enum):
    """What the tests take for the squared norm of the gradient."""

    unbiased = "unbiased"
    plugin = "plugin"


class Estimator(Enum):
    """How gradient statistics are measured."""

    sketch = "sketch"
    workers = "workers"
    per_sequence = "per_sequence"


class Unmeasured(Enum):
    """What a test does where there is nothing to measure."""

    keep = "keep"
    grow = "grow"


class SwitchMode(Enum):
    """How a batch above the batch limit is taken."""

    threshold = "threshold"
    accumulate = "accumulate"
    clip = "clip"


class RateScaling(Enum):
    """How the inner rate follows the batch."""

    none = "none"
    sqrt = "sqrt"
    linear = "linear"


class Shards(Enum):
    """Which sequences a trainer reads."""

    disjoint = "disjoint"
    shared = "shared"


class MergePolicy(Enum):
    """Which trainers are merged."""

    worst_with_worst = "worst_with_worst"
    best_with_worst = "best_with_worst"
    worst_loss_with_best = "worst_loss_with_best"
    none = "none"


class MergeWeights(Enum):
    """What a trainer counts for in the average of a merge."""

    request = "request"
    uniform = "uniform"


class ReleasedWorkers(Enum):
    """What becomes of the workers of a trainer that ended in a merge."""

    join = "join"
    retire = "retire"
    redistribute = "redistribute"


class Final(Enum):
    """What a run leaves as its model."""

    best = "best"
    average = "average"


class Concurrency(Enum):
    """How the instances of one rank share its device."""

    serial = "serial"
    streams = "streams"
    threads = "threads"
    auto = "auto"


class Unfinished(Enum):
    """What is done with a run directory whose run has not ended."""

    refuse = "refuse"
    archive = "archive"
    resume = "resume"
