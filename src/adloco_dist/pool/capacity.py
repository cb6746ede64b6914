"""Memory of a rank's device: what the pool holds there, and how many sequences a micro-batch can have beside that."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adloco_dist.config import Concurrency, InnerOptimizer, OuterState, Settings
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.pool.flat_model import vector_dtype
from adloco_dist.pool.gradient import accumulate_gradient
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer, trainer_entries
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


def state_vectors(
    settings: Settings, num_trainers: int, num_workers: int, matrix_share: float, num_slots: int = 1
) -> dict[str, float]:
    """Number of flat vectors that a rank holds for its share of the pool, by kind; the checkpoint's are on the CPU.

    Args:
        matrix_share: the share of the model's elements that Muon updates, which keeps one moment of them, not two.
    """
    inner, wire = settings.inner, settings.wire
    is_muon = inner.optimizer is InnerOptimizer.muon
    whole = Leaf(slice(0), (0,), (), InnerOptimizer.adamw if is_muon else inner.optimizer, weight_decay=0.0)
    kinds = Counter((entry.kind, entry.is_shared) for entry in trainer_entries(settings.outer, wire))
    kinds += Counter((entry.kind, False) for entry in (*own_entries(wire), *moment_entries([whole], inner)))
    kept: dict[str, float] = {
        "weights": num_workers * kinds[Kind.vector, False],
        "inner moments": num_workers * (kinds[Kind.part, False] - is_muon * matrix_share),
        "outer state": num_trainers * kinds[Kind.vector, True],
    }
    if residuals := kinds[Kind.packed, False]:  # a checkpoint has one for each worker
        kept["residuals"] = num_trainers * residuals
    if fragments := kinds[Kind.fragment, False]:  # of each worker's weights, as they were sent off
        kept["sent off"] = -(-num_workers * fragments // wire.fragments)
    on_its_way = {"on the wire": -(-num_trainers // wire.fragments)} if wire.is_delayed else {}
    return {**kept, "gradient": num_slots, **on_its_way, "checkpoint": sum(kept.values())}


def state_bytes(settings: Settings, num_trainers: int, num_workers: int, parameters: ParameterCount) -> int:
    """Memory of a rank for those vectors and for frozen parameters, which exist once; a rank without workers has the
    model and its gradient, too. Ranks that hold a worker together have equal parts."""
    num_vectors = max(2, sum(state_vectors(settings, num_trainers, num_workers, parameters.matrix_share).values()))
    num_elements = (num_vectors * parameters.trained + parameters.frozen) / settings.pool.ranks_per_worker
    return int(num_elements) * vector_dtype(settings.precision).itemsize


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
    """The largest count up to `maximum` that fits, by doubling and bisection; 0: none does."""
    lower, upper = 0, 1
    while upper <= maximum and fits(upper):
        lower, upper = upper, 2 * upper
    upper = min(upper, maximum + 1)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle)
    return lower


def probe_capacity(
    slots: Sequence[ComputeSlot], trainers: Sequence[Trainer], settings: Settings, maximum: int, sharers: int,
    reserved_bytes: int = 0,
) -> int | None:  # fmt: skip
    """Sequences per micro-batch that fit beside the rank's share of the pool; None: any batch up to `maximum` does; 0:
    not even one sequence does.

    On a GPU by trying; on a CPU, which would swap or be killed, by counting the bytes of small micro-batches. Leaves
    the gradients zero and trainers as they were. Every slot may be in the middle of a micro-batch at one time.

    Args:
        maximum: maximum local batch that any of the trainers can ask for.
        sharers: ranks between which the device's free memory is divided.
        reserved_bytes: memory of a GPU that is kept free for what is yet to come.
    """
    if settings.batching.capacity is not None:
        return settings.batching.capacity
    free_device_memory()
    flat_model = slots[0].flat_model
    flat_model.point_at(trainers[0].workers[0].weights.to(flat_model.device))
    shards = flat_model.shards
    if shards.ranks:  # who must agree, and would wait for one whose micro-batch did not fit
        most = math.ceil(maximum / len(shards.ranks))
        capacity = shards.smallest(_by_counting(slots, trainers, settings, most, sharers)) * len(shards.ranks)
    elif flat_model.device.type == "cuda":
        capacity = _by_trying(slots[0], settings, maximum * len(slots), sharers, reserved_bytes) // len(slots)
    else:
        capacity = _by_counting(slots, trainers, settings, maximum, sharers)
    flat_model.gradient.zero_()
    return None if capacity >= maximum else capacity


def count_resident(
    slot: ComputeSlot, settings: Settings, num_trainers: int, num_workers: int, sharers: int, reserved_bytes: int = 0
) -> int | None:
    """How many of a rank's instances stay on its GPU, counted before there are any; None: all.

    They leave room for a micro-batch of one sequence, and for `reserved_bytes`.
    """
    flat_model, instances = slot.flat_model, settings.instances
    if instances.resident is not None:
        return instances.resident if instances.resident < num_workers else None
    concurrent = instances.concurrency in (Concurrency.streams, Concurrency.threads)
    if flat_model.device.type != "cuda" or concurrent or num_workers < 2:
        return None
    vectors = state_vectors(settings, num_trainers, num_workers, flat_model.matrix_share)
    vector_bytes = flat_model.gradient.nbytes
    per_worker = (vectors["weights"] + vectors["inner moments"]) * vector_bytes / num_workers
    taken = micro_batch_bytes(slot, 1)
    if settings.pool.outer_state is OuterState.device:
        taken += vectors["outer state"] * vector_bytes
    free_device_memory()
    free, _ = torch.cuda.mem_get_info(flat_model.device)
    left = settings.batching.padding_fraction * (free / sharers - reserved_bytes) - taken
    return None if left >= num_workers * per_worker else max(1, int(left // per_worker))


def _by_trying(slot: ComputeSlot, settings: Settings, maximum: int, sharers: int, reserved_bytes: int) -> int:
    """Find the capacity by bisection, with real micro-batches, under a limit of padding_fraction of the free memory.

    What the pool holds is allocated already, moments included, and a fused optimizer step needs nothing more.
    """
    flat_model, device = slot.flat_model, slot.flat_model.device
    free, total = torch.cuda.mem_get_info(device)
    room = free / sharers + torch.cuda.memory_reserved(device) - reserved_bytes
    usable = settings.batching.padding_fraction * room
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, usable / total)), device)

    def fits(batch: int) -> bool:
        try:
            accumulate_gradient(flat_model, slot.objective, slot.objective.trial_batch(batch, device), None)
            torch.cuda.synchronize(device)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_device_memory()
        return False

    try:
        return max_fitting(fits, maximum)
    finally:
        free_device_memory()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _by_counting(
    slots: Sequence[ComputeSlot], trainers: Sequence[Trainer], settings: Settings, maximum: int, sharers: int
) -> int:
    """Find the capacity from the bytes of micro-batches of one and of two sequences.

    Each of more sequences takes no more than each of two: where the growing part has its peak, the rest is small.
    The difference between one and two would be too little: with a large vocabulary both have their peak at its
    gradients, and many sequences have it at their logits.
    """
    counted = [micro_batch_bytes(slots[0], batch) for batch in range(1, min(maximum, 2) + 1)]
    memory, device = settings.cluster.memory_bytes, slots[0].flat_model.device
    num_workers, share = sum(len(trainer.workers) for trainer in trainers), slots[0].flat_model.matrix_share
    vectors = state_vectors(settings, len(trainers), num_workers, share, len(slots))
    if device.type == "cuda":
        memory, held = torch.cuda.mem_get_info(device)[0] // sharers, 0
    elif memory is None:  # what the pool holds is no longer available; the copy for a checkpoint is made later
        memory, held = psutil.virtual_memory().available // sharers, vectors["checkpoint"]
    else:
        held = sum(vectors.values())
    left = memory - held * slots[0].flat_model.gradient.nbytes
    left_per_slot = settings.batching.padding_fraction * left / len(slots)
    return 0 if left_per_slot < counted[0] else max(1, int(left_per_slot * len(counted) // counted[-1]))


def micro_batch_bytes(slot: ComputeSlot, num_sequences: int) -> int:
    """Count what a micro-batch of so many sequences on this rank takes beside weights and gradients, at its peak."""
    flat_model = slot.flat_model
    batch = slot.objective.trial_batch(num_sequences * (len(flat_model.shards.ranks) or 1), flat_model.device)
    with PeakBytes([flat_model.weights, flat_model.payload]) as counter:
        accumulate_gradient(flat_model, slot.objective, batch, None)
    return counter.peak


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside of it, on any device; `peak` is their maximum at any time."""

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
