"""The module that a rank trains, as its objective builds it; of a worker that ranks hold together, its part."""

from collections.abc import Sequence

import psutil
import torch
from torch import nn

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings, SettingsError
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import computes_in_bf16, converted, vector_dtype

SHARE_OF_MEMORY = 0.8
"""Of a node's free memory, for whole models of ranks that have not divided theirs yet."""


def build_module(objective: Objective, settings: Settings, runtime: Runtime) -> nn.Module:
    """Build the module, and keep this rank's part of it where several ranks hold a worker together. Collective.

    Every rank builds all of such a module in the memory of its node, as many ranks at one time as it has room for.

    Raises:
        SettingsError: on all ranks, when it cannot be built, or divided, on one.
    """
    control, module, error = runtime.control, None, None
    turn, num_turns = (0, 1) if runtime.of_seat is None else _turns(objective, settings, runtime)
    for present in range(num_turns):
        if present == turn:
            try:
                module = _built(objective, settings, runtime)
            except SettingsError as mistake:
                error = mistake
        if num_turns > 1:
            control.exchange({})
    control.agree(error)
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
    """The layers that the ranks of a worker gather one by one.

    Raises:
        SettingsError: ranks cannot hold such a module together.
    """
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
    nodes = runtime.nodes
    replies = runtime.control.exchange({"room": _room(objective, settings)})
    at_once = {node: 0 for node in nodes}
    for node in at_once:
        rooms = [reply["room"] for reply, other in zip(replies, nodes, strict=True) if other == node]
        at_once[node] = max(1, min(len(rooms), *rooms))
    turns = [nodes[:rank].count(node) // at_once[node] for rank, node in enumerate(nodes)]
    return turns[runtime.rank], max(turns) + 1


def _room(objective: Objective, settings: Settings) -> int:
    """How many whole modules this node has room for; very many where their size is not known before."""
    parameters = objective.num_parameters()
    if parameters is None:
        return 1 << 30
    whole_bytes = parameters.total * vector_dtype(settings.precision).itemsize
    return int(SHARE_OF_MEMORY * psutil.virtual_memory().available // whole_bytes)
