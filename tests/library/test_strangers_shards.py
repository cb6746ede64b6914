"""Models that others divide among the ranks of a worker: copies stay copies, and empty parts are no obstacle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from adloco_dist import DiLoCo, Wire
from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.vectors import local
from helpers.plain import PLAIN, on_ranks

pytestmark = pytest.mark.stranger
WIRES: dict[str, Averager | None] = {
    "fp32": None,
    "bf16": Quantized(BFloat16()),
    "int8": Quantized(WholeNumbers(8)),
    "int4": Quantized(WholeNumbers(4)),
    "int4 with feedback": Quantized(WholeNumbers(4), keeps_residual=True),
    "sparse": Sparse(),
}
STREAMING = {"plain": Wire(), "in fragments, delayed": Wire(fragments=2, delay_updates=1)}


class Divided(nn.Module):
    """A matrix of which ranks have unequal parts, between vectors that all have whole, as in tensor parallelism."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Parameter(distribute_tensor(torch.ones(96), mesh, [Replicate()]))
        self.matrix = nn.Parameter(distribute_tensor(torch.randn(65, 80), mesh, [Shard(0)]))
        self.after = nn.Parameter(distribute_tensor(torch.ones(96), mesh, [Replicate()]))
        self.plain = nn.Parameter(torch.ones(7))


def train_with_copies(runtime: Runtime, wire: str, streaming: str, ranks_per_worker: int) -> dict[str, Any]:
    """What a rank has of the vectors that are whole, while workers take different updates."""
    shape = (runtime.world_size // ranks_per_worker, ranks_per_worker)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("worker", "shard"))
    module = Divided(mesh["shard"])
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    worker, shard = divmod(runtime.rank, ranks_per_worker)
    travels = replace(STREAMING[streaming], averager=WIRES[wire])
    diloco = DiLoCo(module, optimizer, 4, PLAIN, mesh["worker"].get_group(), travels, timeout_seconds=60)
    with diloco:
        for number in range(9):
            generator = torch.Generator().manual_seed(100 * worker + number)
            for parameter in module.parameters():
                gradient = 1e-3 * torch.randn(parameter.shape, generator=generator)
                own = local(parameter)
                if own.shape != parameter.shape:
                    gradient = gradient.chunk(ranks_per_worker)[shard]
                own.sub_(gradient)
            diloco.count_update()
        diloco.outer_step()
    copies = [module.before, module.after, module.plain]
    return {"copies": torch.cat([local(parameter) for parameter in copies]), "matrix": local(module.matrix)}


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("wire", WIRES)
def test_copies_within_a_worker_stay_equal_to_the_bit(wire: str, streaming: str) -> None:
    first, *others = on_ranks(train_with_copies, 4, wire, streaming, 2)
    assert not torch.equal(first["copies"], torch.ones_like(first["copies"]))
    for other in others:
        assert torch.equal(other["copies"], first["copies"])
    assert torch.equal(first["matrix"], others[1]["matrix"])


def test_copies_of_three_workers_are_the_mean_of_what_they_were() -> None:
    first, *others = on_ranks(train_with_copies, 6, "fp32", "plain", 2)
    expected = torch.zeros(199, dtype=torch.float64)
    for worker in range(3):
        for number in range(9):
            generator = torch.Generator().manual_seed(100 * worker + number)
            drawn = [1e-3 * torch.randn(shape, generator=generator) for shape in ((96,), (65, 80), (96,), (7,))]
            expected += torch.cat([drawn[0], drawn[2], drawn[3]]).double() / 3
    for found in (first, *others):
        assert torch.equal(found["copies"], first["copies"])
        torch.testing.assert_close(1 - found["copies"].double(), expected, rtol=0, atol=1e-6)


def place_differently(runtime: Runtime) -> str:
    """Workers that divide a square matrix along different dimensions: parts of one shape that are not the same part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    module = nn.Module()
    dimension = runtime.rank // 2
    module.matrix = nn.Parameter(distribute_tensor(torch.ones(1, 1).expand(1, 1).clone(), mesh["shard"], [Replicate()]))
    module.square = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh["shard"], [Shard(dimension)]))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(ValueError) as raised:
        DiLoCo(module, optimizer, 3, group=mesh["worker"].get_group())
    dist.barrier()
    return str(raised.value)


def test_workers_that_are_divided_differently_are_refused() -> None:
    for line in on_ranks(place_differently, 4):
        assert line.startswith("parameter square differs between ranks: "), line
        assert "Shard(dim=0)" in line
        assert "Shard(dim=1)" in line
