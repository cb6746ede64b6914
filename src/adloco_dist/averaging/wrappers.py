"""What DistributedDataParallel and torch.compile have wrapped."""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from adloco_dist.text import ranks_in_words


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The module, then what DistributedDataParallel and torch.compile have wrapped, from the outside in."""
    inner: object = module
    while isinstance(inner, nn.Module):
        yield inner
        wraps = isinstance(inner, DistributedDataParallel | DataParallel)
        inner = inner.module if wraps else getattr(inner, "_orig_mod", None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel and torch.compile, which put their own names before its names."""
    return list(_wrappers(module))[-1]


def check_data_parallel(module: nn.Module, ranks: Sequence[int]) -> None:
    """Make sure that DistributedDataParallel, if the module is wrapped in it, joins no two of these ranks.

    Raises:
        ValueError: it does, so that those ranks are one worker; one line.
    """
    wrappers = [inner for inner in _wrappers(module) if isinstance(inner, DistributedDataParallel)]
    joined = sorted({rank for ddp in wrappers for rank in dist.get_process_group_ranks(ddp.process_group)} & set(ranks))
    if len(joined) > 1:
        rule = f"averages gradients over {ranks_in_words(joined)}, which makes them one worker"
        remedy = "wrap no model in it, or give group one rank of each worker"
        raise ValueError(f"model: its DistributedDataParallel {rule}; {remedy}")
