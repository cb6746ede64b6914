"""Memory of a device: what the pool holds there, what a micro-batch adds, and whether it ran out."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adloco_dist.config import InnerOptimizer, Settings
from adloco_dist.pool.flat_model import vector_dtype
from adloco_dist.pool.trainer import trainer_entries
from adloco_dist.pool.worker import Leaf, moment_entries, own_entries
from adloco_dist.schema import Kind

SIGNS_OF_NO_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",  # the CUDA driver and Triton
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS makes its handle when it is first used
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of errors that mean it, and are no `torch.OutOfMemoryError`."""


def state_vectors(settings: Settings, num_trainers: int, num_workers: int, num_slots: int = 1) -> dict[str, int]:
    """Flat vectors that a rank holds for its share of the pool, by kind; the checkpoint's copy always on the CPU."""
    inner, wire = settings.inner, settings.wire
    # Of Muon's matrices there is one moment, but which parameters those are is known when the model has been built.
    optimizer = InnerOptimizer.sgd if inner.optimizer is InnerOptimizer.sgd else InnerOptimizer.adamw
    whole = Leaf(slice(0), (0,), (), optimizer, weight_decay=0.0)
    kinds = Counter((entry.kind, entry.is_shared) for entry in trainer_entries(settings.outer, wire))
    kinds += Counter((entry.kind, False) for entry in (*own_entries(wire), *moment_entries([whole], inner)))
    kept = {
        "weights": num_workers * kinds[Kind.vector, False],
        "inner moments": num_workers * kinds[Kind.part, False],
        "outer state": num_trainers * kinds[Kind.vector, True],
    }
    if residuals := kinds[Kind.packed, False]:  # a checkpoint has one for each worker
        kept["residuals"] = num_trainers * residuals
    if fragments := kinds[Kind.fragment, False]:  # of each worker's weights, as they were sent off
        kept["sent off"] = -(-num_workers * fragments // wire.fragments)
    on_its_way = {"on the wire": -(-num_trainers // wire.fragments)} if wire.is_delayed else {}
    return {**kept, "gradient": num_slots, **on_its_way, "checkpoint": sum(kept.values())}


def state_bytes(settings: Settings, num_trainers: int, num_workers: int, num_trained: int, num_frozen: int) -> int:
    """Memory of a rank for those vectors, of so many parameters, of which frozen ones are there once; the model is
    built on a rank without workers, too, with its gradient."""
    num_vectors = max(2, sum(state_vectors(settings, num_trainers, num_workers).values()))
    return (num_vectors * num_trained + num_frozen) * vector_dtype(settings.precision).itemsize


def available_bytes(device: torch.device, sharers: int) -> int:
    """Memory for one of the processes that share this machine's, and the device's where that has its own."""
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free += torch.cuda.mem_get_info(device)[0]
    return free // sharers


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether there was no memory left, for torch, its libraries or a compiled kernel."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS_OF_NO_MEMORY)


def free_device_memory() -> None:
    """Give back what a failed micro-batch left in the caches, so that a smaller one finds the memory whole."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def max_fitting(fits: Callable[[int], bool], maximum: int) -> int:
    """The largest count up to `maximum` that fits, as all below it do, by doubling and bisection; 0: none does."""
    lower, upper = 0, 1
    while upper <= maximum and fits(upper):
        lower, upper = upper, 2 * upper
    upper = min(upper, maximum + 1)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle)
    return lower


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside of it, on any device: `peak` is the maximum at one time."""

    def __init__(self, existing: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, key: int, num_bytes: int) -> None:
        self._counted.discard(key)
        self._live -= num_bytes
