"""The module that a rank trains: built, divided where ranks hold a worker together, and tried out (docs/state.md)."""

import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from adloco_dist.averaging.checks import word_sum
from adloco_dist.buffers import UnsuitableBufferError, changing_buffers, persistent_buffers
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import InnerSettings, Settings, SettingsError, require
from adloco_dist.objective.matrices import Matrices
from adloco_dist.objective.protocol import LossError, Objective
from adloco_dist.pool.capacity import is_out_of_memory
from adloco_dist.pool.flat_model import autocast, computes_in_bf16, converted, vector_dtype
from adloco_dist.text import first_difference, first_line
from adloco_dist.vectors import local

SHARE_OF_MEMORY = 0.8
"""The part of a node's free memory that its ranks may take for whole models before they divide them."""
TRIALS = (2, 1)
"""Sequences that the model is tried with: one has no variance, which normalisation over a batch refuses."""


def build_module(objective: Objective, settings: Settings, runtime: Runtime) -> nn.Module:
    """Build the module, and keep this rank's part of it where several ranks hold a worker together. Collective.

    Every rank builds all of such a module in the memory of its node, as many ranks at one time as it has room for.

    Raises:
        SettingsError: on all ranks, when it cannot be built, or divided, on one.
    """
    module, error = None, None
    turn, num_turns = (0, 1) if runtime.of_seat is None else _turns(objective, settings, runtime)
    for present in range(num_turns):
        if present == turn:
            try:
                module = _built(objective, settings, runtime)
            except SettingsError as mistake:
                error = mistake
        if num_turns > 1:
            runtime.control.exchange({})
    runtime.control.agree(error)
    assert module is not None
    return module


def _built(objective: Objective, settings: Settings, runtime: Runtime) -> nn.Module:
    in_bf16 = computes_in_bf16(settings.precision, runtime.device)
    if runtime.of_seat is None:
        return objective.build(runtime.device, in_bf16)
    from adloco_dist.pool.sharding import shard_module  # with fully_shard: half a second

    cpu = torch.device("cpu")  # no device has room for all of it
    module = converted(objective.build(cpu, in_bf16), cpu, settings.precision)
    blocks = divided_blocks(objective, module, settings)
    shard_module(module, blocks, runtime.of_seat, runtime.device, in_bf16)
    return module


def divided_blocks(objective: Objective, module: nn.Module, settings: Settings) -> Sequence[nn.Module]:
    """The layers that the ranks of a worker gather one by one; raises a SettingsError where ranks cannot hold such a
    module together."""
    from adloco_dist.pool.sharding import UnsuitableModuleError, blocks_of, check_division

    size = settings.pool.ranks_per_worker
    try:
        blocks = objective.blocks(module) or blocks_of(module)
        check_division(module, blocks, size)
    except UnsuitableModuleError as mistake:
        raise SettingsError(f"pool.ranks_per_worker={size}: {objective.describe()}: {mistake}") from mistake
    return blocks


def _turns(objective: Objective, settings: Settings, runtime: Runtime) -> tuple[int, int]:
    """When this rank builds its module, and how many turns there are: by the memory of every node. Collective."""
    nodes, parameters = runtime.nodes, objective.num_parameters()
    room = runtime.world_size  # where the size of a module is not known before, all ranks build at one time
    if parameters is not None:
        whole_bytes = parameters.total * vector_dtype(settings.precision).itemsize
        room = max(1, int(SHARE_OF_MEMORY * psutil.virtual_memory().available // whole_bytes))
    replies = runtime.control.exchange({"node": nodes[runtime.rank], "room": room})
    room_on = {node: min(reply["room"] for reply in replies if reply["node"] == node) for node in set(nodes)}
    turns = [nodes[:rank].count(node) // room_on[node] for rank, node in enumerate(nodes)]
    return turns[runtime.rank], max(turns) + 1


def examine_module(objective: Objective, module: nn.Module, settings: Settings, runtime: Runtime) -> tuple[str, ...]:
    """Move the module to the rank's device and try it out there; the names of the buffers that training changes.

    Collective. The module is whole, or this rank's part of it, on its device.

    Raises:
        SettingsError: on all ranks, where none of its parameters is trained, a changing buffer cannot be averaged, or
            ranks differ in what is not trained.
    """
    trained = [local(parameter) for parameter in module.parameters() if parameter.requires_grad]
    built = {"the model as it was built": _bits(trained), "what the model keeps frozen": _bits(_frozen(module))}
    changing: tuple[str, ...] = ()
    with runtime.control.agreed():
        if runtime.of_seat is None:
            converted(module, runtime.device, settings.precision)
        changing = _changing(objective, module, settings, runtime.device)
        if changing and runtime.of_seat is not None:
            rule = f"goes with models alone that training changes no buffer of, as it does {changing[0]}; use 1"
            raise SettingsError.of("pool.ranks_per_worker", settings.pool.ranks_per_worker, rule)
    replies = runtime.control.exchange({**built, "what training changes of the model": list(changing)})
    for shard in range(runtime.ranks_per_worker):  # ranks that hold the same part are compared with each other
        if difference := first_difference(replies[shard :: runtime.ranks_per_worker]):
            remedy = "start every node with the same command and model, whose random numbers come from torch alone"
            raise SettingsError(f"{difference}; {remedy}")
    return changing


def require_matrices(inner: InnerSettings, objective: Objective, hidden: Mapping[str, Matrices]) -> None:
    """Refuse a model in which Muon has nothing to update; raises a SettingsError."""
    rule = f"{objective.describe()}: no matrix that is trained lies between its input and its output; use inner=adamw"
    require(bool(hidden), "inner.optimizer", inner.optimizer, rule)


def _changing(objective: Objective, module: nn.Module, settings: Settings, device: torch.device) -> tuple[str, ...]:
    model = objective.describe()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SettingsError(f"{model}: all of its parameters are frozen; leave requires_grad of some of them true")
    forward = partial(_try_out, objective, module, settings, device)
    try:
        return changing_buffers(module, vector_dtype(settings.precision), forward)
    except UnsuitableBufferError as mistake:
        remedy = "make it a dense, real tensor of one shape, or if it is a cache, register it with persistent=False"
        raise SettingsError(f"{model}: training changes its buffers, and {mistake}; {remedy}") from mistake


def _try_out(objective: Objective, module: nn.Module, settings: Settings, device: torch.device) -> None:
    """Compute the loss and the gradients of a few sequences, and of one, in training mode; raises a SettingsError where
    that cannot be done, or the loss is non-finite."""
    for num_sequences in TRIALS:
        batch = objective.trial_batch(num_sequences, device)
        try:
            with torch.enable_grad():
                with autocast(device, settings.precision):
                    loss, _ = objective.loss(module, batch)
                loss.backward()
        except LossError as mistake:
            raise SettingsError(str(mistake)) from mistake
        except Exception as error:  # of any kind: the model is the user's
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                continue  # the capacity is found later, and says so
            remedy = "correct the model or its loss"
            if num_sequences == 1:
                remedy = "a micro-batch may be one sequence: use LayerNorm or GroupNorm in place of BatchNorm"
            reason = f"{type(error).__name__}: {first_line(error)}, {_where(error)}"
            rule = f"a batch of {num_sequences} sequence(s) cannot be computed ({reason})"
            raise SettingsError(f"{objective.describe()}: {rule}; {remedy}") from error
        finally:
            module.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            rule = f"the loss of the first {num_sequences} sequence(s) is {float(loss)}"
            raise SettingsError(f"{objective.describe()}: {rule}; it must be finite before training")


def _where(error: Exception) -> str:
    """Return the file and line where an error was raised, outside of torch where there is such a place."""
    frames = traceback.extract_tb(error.__traceback__)
    *_, last = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{Path(last.filename).name}:{last.lineno}"


def _frozen(module: nn.Module) -> list[torch.Tensor]:
    """Return what no checkpoint holds: frozen parameters, and persistent buffers as they begin."""
    frozen = [local(parameter) for parameter in module.parameters() if not parameter.requires_grad]
    return frozen + [tensor for buffer in persistent_buffers(module) if (tensor := buffer.tensor) is not None]


def _bits(tensors: Sequence[torch.Tensor]) -> int:
    """Compute a checksum over the bits of tensors."""
    checksum = 0
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_quantized:
            checksum = (31 * checksum + int(word_sum(tensor))) % 2**64
    return checksum
