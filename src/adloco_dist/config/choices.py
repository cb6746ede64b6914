"""The settings that name one of a few ways, as enums: Hydra then refuses every other word."""

from enum import Enum


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp64 = "fp64"


class Placement(Enum):
    pack = "pack"
    spread = "spread"


class OuterState(Enum):
    device = "device"
    cpu = "cpu"


class Algorithm(Enum):
    diloco = "diloco"
    adloco = "adloco"
    localsgd = "localsgd"
    ddp = "ddp"


class InnerOptimizer(Enum):
    adamw = "adamw"
    sgd = "sgd"


class Schedule(Enum):
    constant = "constant"
    cosine = "cosine"


class Corpus(Enum):
    python_stdlib = "python_stdlib"
    text = "text"
    tokens = "tokens"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Backend(Enum):
    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class TrackingMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"
