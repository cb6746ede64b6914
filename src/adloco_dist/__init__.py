"""DiLoCo and AdLoCo on torch.distributed: a library for any training loop, and a launcher that is built on it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adloco_dist.averaging.averager import Wire
    from adloco_dist.averaging.checks import PeerLostError, RanksDisagreeError
    from adloco_dist.averaging.outer_sgd import OuterSGD
    from adloco_dist.diloco import DiLoCo
    from adloco_dist.members.members import Members
    from adloco_dist.noise_scale import NoiseEstimate, NoiseScale

__version__ = "0.1.0"
__all__ = [
    "DiLoCo",
    "Members",
    "NoiseEstimate",
    "NoiseScale",
    "OuterSGD",
    "PeerLostError",
    "RanksDisagreeError",
    "Wire",
]

# The library's names are imported when they are first used: the launcher imports packages below this one, and reports
# mistakes in its settings before it has spent a second on importing torch.
_MODULES = {
    "DiLoCo": "adloco_dist.diloco",
    "Members": "adloco_dist.members.members",
    "NoiseEstimate": "adloco_dist.noise_scale",
    "NoiseScale": "adloco_dist.noise_scale",
    "OuterSGD": "adloco_dist.averaging.outer_sgd",
    "PeerLostError": "adloco_dist.averaging.checks",
    "RanksDisagreeError": "adloco_dist.averaging.checks",
    "Wire": "adloco_dist.averaging.averager",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
