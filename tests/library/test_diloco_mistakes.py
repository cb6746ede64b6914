"""What `DiLoCo` refuses, in one line."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from adloco_dist import DiLoCo, OuterSGD
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Normed, Tied, adamw, batch, on_ranks, update


def new(**changes: Any) -> DiLoCo:
    module = changes.pop("module", None) or Tied()
    optimizer = changes.pop("optimizer", None) or adamw(module)
    return DiLoCo(module, optimizer, **changes)


def with_parameter(parameter: torch.Tensor) -> nn.Module:
    module = Tied()
    module.register_parameter("another", nn.Parameter(parameter, requires_grad=parameter.is_floating_point()))
    return module


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    module = Tied()
    module.register_buffer("another", buffer)
    return module


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no update": (lambda: new(updates_per_round=0), "updates_per_round=0: must be a whole number >= 1"),
    "half an update": (lambda: new(updates_per_round=0.5), "updates_per_round=0.5: must be a whole number >= 1"),
    "no time": (lambda: new(timeout_seconds=0), "timeout_seconds=0: must be > 0"),
    "outer rate": (lambda: OuterSGD(lr=0), "lr=0: must be > 0 and finite"),
    "outer momentum": (lambda: OuterSGD(momentum=1), "momentum=1: must be in [0, 1)"),
    "all frozen": (lambda: new(module=Tied().requires_grad_(False)), "optimizer: it trains no parameter of the model;"),
    "no optimizer": (lambda: new(optimizer=iter(())), "optimizer: it trains no parameter of the model; pass the"),
    "another's": (lambda: new(optimizer=adamw(Tied())), "optimizer: 6 of its parameters are not the model's; pass"),
    "first sharding": (
        lambda: new(module=FullyShardedDataParallel(Tied(), use_orig_params=True, device_id=torch.device("cpu"))),
        "model: FullyShardedDataParallel has changed its parameters; use fully_shard,",
    ),
    "meta": (lambda: new(module=Tied().to("meta")), "model: its parameter embedding.weight is on the meta device;"),
    "lazy": (
        lambda: new(module=nn.LazyLinear(3), optimizer=adamw(Tied())),
        "model: its parameter weight is not initialized; run a forward pass first",
    ),
    "sparse": (
        lambda: new(module=with_parameter(torch.ones(2).to_sparse())),
        "model: its parameter another is sparse, which is not supported; use a dense one",
    ),
    "complex": (
        lambda: new(module=with_parameter(torch.ones(2, dtype=torch.complex64))),
        "model: its parameter another is complex, which is not supported; use torch.view_as_real",
    ),
    "sparse buffer": (lambda: new(module=with_buffer(torch.ones(2).to_sparse())), "model: its buffer another is not"),
    "data parallel": (
        lambda: new(module=nn.parallel.DistributedDataParallel(Tied())),
        "model: its DistributedDataParallel averages gradients over ranks {0,1}, which makes them one worker; wrap no",
    ),
    "not in the group": (
        lambda: new(group=[dist.new_group([1]), dist.new_group([0])][dist.get_rank()]),
        "group: this rank is not in it; construct DiLoCo on its ranks alone",
    ),
}


def refused(runtime: Runtime, case: str) -> str:
    act, _ = BAD[case]
    with pytest.raises(ValueError) as raised:
        act()
    return str(raised.value)


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_reported_in_one_line(case: str) -> None:
    for line in on_ranks(refused, 2, case):
        assert line.startswith(BAD[case][1]), line
        assert "\n" not in line


def test_without_a_process_group_it_says_what_to_call() -> None:
    line = re.escape("group=None: torch.distributed has no default process group; call torch.distributed.init_")
    with pytest.raises(ValueError, match=line):
        new()


def differ(runtime: Runtime, what: str) -> str:
    """Rank 1 constructs another DiLoCo than ranks 0 and 2."""
    module, settings = Normed(), {}
    if runtime.rank == 1:
        if what == "shape":
            module.head = nn.Linear(8, 12)
        elif what == "type":
            module.double()
        elif what == "another parameter":
            module.further = nn.Linear(2, 2)
        elif what == "frozen parameter":
            module.embedding.weight.data[3, 2] += 1e-7
        elif what == "buffer":
            module.mask = torch.zeros(4)
        elif what == "another buffer":
            module.register_buffer("further", torch.zeros(2))
        elif what == "H":
            settings["updates_per_round"] = 50
        elif what == "outer":
            settings["outer"] = OuterSGD(lr=0.5)
    with pytest.raises(ValueError) as raised:
        new(module=module, **settings)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("shape", "parameter head.bias differs between ranks: [11] torch.float32 on ranks {0,2}, [12] torch.float32"),
        ("type", "buffer mask differs between ranks: [3] torch.float32 on ranks {0,2}, [3] torch.float64 on rank 1;"),
        ("another parameter", "parameter further.bias differs between ranks: missing on ranks {0,2}, [2] torch.f"),
        ("frozen parameter", "frozen parameter embedding.weight differs between ranks: [11, 8] torch.float32 with"),
        ("buffer", "buffer mask differs between ranks: [3] torch.float32 on ranks {0,2}, [4] torch.float32 on rank 1;"),
        ("another buffer", "buffer further differs between ranks: missing on ranks {0,2}, [2] torch.float32 on rank 1"),
        ("H", "updates_per_round differs between ranks: 500 on ranks {0,2}, 50 on rank 1; start all ranks with the"),
        ("outer", "outer lr differs between ranks: 0.7 on ranks {0,2}, 0.5 on rank 1; start all ranks with the same"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_of_them(what: str, line: str) -> None:
    for refusal in on_ranks(differ, 3, what):
        assert refusal.startswith(line), refusal
        assert "\n" not in refusal


def change_later(runtime: Runtime, what: str) -> str:
    module = Normed()
    (optimizer,) = adamw(module)
    diloco = DiLoCo(module, optimizer)
    update(module, [optimizer], batch(runtime.rank, 0))
    diloco.outer_step()
    if what == "type":
        module.double()
    elif what == "moved":
        module.to("meta")
    elif what == "replaced":
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    elif what == "not held":
        optimizer.param_groups[0]["params"] = list(module.first.parameters())
    elif what == "unfrozen":
        module.embedding.requires_grad_(True)
    elif what == "constant":
        module.get_buffer("mask").zero_()
    elif what == "buffer":
        module.norm.running_mean = torch.zeros(4)
    with pytest.raises(ValueError) as raised:
        diloco.outer_step()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("type", "model: its parameter first.weight was [8, 8] torch.float32 on cpu, and is [8, 8] torch.float64 on"),
        ("moved", "model: its parameter first.weight has been replaced or removed; construct DiLoCo when model"),
        ("replaced", "model: its parameter head.weight has been replaced or removed; construct DiLoCo when model"),
        ("not held", "optimizer: it does not hold the model's parameter second.bias any more; construct DiLoCo when"),
        ("unfrozen", "model: its parameter embedding.weight was not trained before, and is now; construct DiLoCo"),
        ("constant", "model: its buffer mask has changed, but did not in the first round; a cache is registered with"),
        ("buffer", "model: its buffer norm.running_mean is no dense [8] torch.float32 any more; a buffer keeps its"),
    ],
)
def test_what_changes_after_construction_is_refused(what: str, line: str) -> None:
    for refusal in on_ranks(change_later, 2, what):
        assert refusal.startswith(line), refusal
        assert "\n" not in refusal
