"""The averager that the settings name."""

from collections.abc import Sequence

import torch

from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.inside_first import InsideFirst
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.config import WireFormat, WireSettings


def averagers() -> dict[str, Averager]:
    """Every format with its own settings as they stand, by name."""
    return {format.name: _by_format(WireSettings(format), torch.float32) for format in WireFormat}


def new_averager(wire: WireSettings, dtype: torch.dtype, nodes: Sequence[int]) -> Averager:
    """How pseudo-gradients of this type travel between ranks on these nodes; as they are inside of a node, before they
    travel to others in few bits."""
    averager = _by_format(wire, dtype)
    if isinstance(averager, FullPrecision) or len(set(nodes)) == len(nodes):
        return averager
    return InsideFirst(averager, tuple(nodes))


def _by_format(wire: WireSettings, dtype: torch.dtype) -> FullPrecision | Quantized | Sparse:
    match wire.format:
        case WireFormat.fp32:
            return FullPrecision(dtype)
        case WireFormat.bf16:
            return Quantized(BFloat16())
        case WireFormat.int8:
            return Quantized(WholeNumbers(8))
        case WireFormat.int4:
            return Quantized(WholeNumbers(4))
        case WireFormat.sparse:
            return Sparse(wire.fraction)
