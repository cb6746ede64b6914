"""`DiLoCo` around models that fully_shard has distributed: parts of them do what whole ones do."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adloco_dist import DiLoCo, OuterSGD, Wire
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.vectors import local
from helpers.plain import Tied, adamw, batch, loss, on_ranks, update

UPDATES, ROUNDS = 4, 3
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "fragments": {"wire": Wire(fragments=4)},
    "delayed": {"wire": Wire(delay_updates=2)},
}


def sharded(shards: int) -> tuple[nn.Module, dist.ProcessGroup]:
    """A model over so many ranks, and the ranks that hold the same part of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("worker", "shard"))
    module = Tied(width=7).double()
    fully_shard(module.head, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    return module, mesh["worker"].get_group()


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in module.state_dict().items()}


class Side:
    """A rank's worker, or its part of one."""

    def __init__(self, shards: int, way: str) -> None:
        self.shards = shards
        self.module, group = sharded(shards) if shards > 1 else (Tied(width=7).double(), None)
        self.optimizers = adamw(self.module)
        self.diloco = DiLoCo(self.module, self.optimizers, UPDATES, group=group, **WAYS[way])

    def states(self) -> list[dict[str, Any]]:
        return copy.deepcopy([one.state_dict() for one in (self.module, self.optimizers[0], self.diloco)])

    def load(self, states: list[dict[str, Any]]) -> None:
        for one, state in zip((self.module, self.optimizers[0], self.diloco), states, strict=True):
            one.load_state_dict(state)

    def take(self, runtime: Runtime, numbers: range, breaks_at: int | None) -> list[float]:
        """Updates of two workers, which read the same whatever ranks they have; the losses of anchors after each."""
        seen, (worker, part) = [], divmod(runtime.rank, self.shards)
        with self.diloco:
            for number in numbers:
                if number == breaks_at and runtime.rank == 2 * self.shards - 1:  # one rank's part of worker 1
                    *_, last = self.module.parameters()
                    local(last)[-1:] = float("nan")
                update(self.module, self.optimizers, batch(worker, number).chunk(self.shards)[part])
                with self.diloco.outer_weights(), torch.no_grad():
                    seen.append(float(loss(self.module, batch(9, 9))))
        return seen


def train(runtime: Runtime, shards: int, way: str, breaks_at: int | None = None, resumes_at: int = 0) -> dict[str, Any]:
    side = Side(shards, way)
    seen = side.take(runtime, range(resumes_at), breaks_at)
    if resumes_at:
        states, side = side.states(), Side(shards, way)
        side.load(states)
    seen += side.take(runtime, range(resumes_at, UPDATES * ROUNDS), breaks_at)
    assert side.diloco.last_step
    return {"module": whole(side.module), "seen": seen, "finite": side.diloco.last_step.num_finite}


def assert_alike(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for rank in found:
        assert rank["finite"] == wanted["finite"]
        torch.testing.assert_close(rank["seen"], wanted["seen"], rtol=1e-9, atol=1e-12)
    for name, tensor in wanted["module"].items():
        torch.testing.assert_close(found[0]["module"][name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_parts_come_to_what_whole_models_do(way: str) -> None:
    wanted, _ = on_ranks(train, 2, 1, way)
    assert_alike(on_ranks(train, 4, 2, way), wanted)


@pytest.mark.parametrize("way", ["whole", "delayed"])
def test_a_worker_of_which_one_part_is_not_finite_is_left_out_as_a_whole(way: str) -> None:
    last = UPDATES * ROUNDS - 3
    wanted, _ = on_ranks(train, 2, 1, way, last)
    found = on_ranks(train, 4, 2, way, last)
    assert wanted["finite"] == 1
    assert_alike(found, wanted)


@pytest.mark.parametrize("way", ["whole", "delayed"])
@pytest.mark.parametrize("resumes_at", [4, 6])
def test_parts_resume_bitwise(way: str, resumes_at: int) -> None:
    wanted = on_ranks(train, 4, 2, way)
    for found, one in zip(on_ranks(train, 4, 2, way, None, resumes_at), wanted, strict=True):
        assert found["seen"] == one["seen"]
        assert all(torch.equal(found["module"][name], tensor) for name, tensor in one["module"].items())


def compressed(runtime: Runtime) -> list[torch.Tensor]:
    module, group = sharded(2)
    optimizers = adamw(module)
    wire = Wire(Quantized(WholeNumbers(8)), fragments=2, delay_updates=1)
    with DiLoCo(module, optimizers, UPDATES, group=group, wire=wire) as diloco:
        for number in range(UPDATES * ROUNDS):
            update(module, optimizers, batch(runtime.rank, number))
    anchor = diloco.state_dict()["anchor"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in anchor.values())
    return list(anchor.values())


def test_compressed_averages_leave_equal_parts_equal() -> None:
    found = on_ranks(compressed, 4)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(x, y) for x, y in zip(found[one], found[other], strict=True))


def refused(runtime: Runtime, what: str) -> str:
    module, group = sharded(2)
    settings: dict[str, Any] = {"group": None if what == "group" else group}
    if what == "part":
        settings["group"] = [dist.new_group([0, 3]), dist.new_group([1, 2])][runtime.rank in (1, 2)]
    if what == "mesh":
        module, other = Tied().double(), init_device_mesh("cpu", (4,))
        fully_shard(module.head, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
        fully_shard(module, mesh=other)
    with pytest.raises(ValueError) as raised:
        DiLoCo(module, adamw(module), UPDATES, **settings)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("group", "group: ranks {0,1} hold parts of one worker's model; give the ranks that hold the same part of it,"),
        (
            "part",
            "averaged part of the model differs between ranks: (0,) of (2,) on rank 0, (1,) of (2,) on rank 3; start",
        ),
        ("mesh", "model: its parameter head.weight is sharded over other ranks than first.weight; shard all over one"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_one_line(what: str, line: str) -> None:
    found = on_ranks(refused, 4, what)[0]
    assert found.startswith(line), found
    assert "\n" not in found


def train_with_a_short_bias(runtime: Runtime, name: str) -> dict[str, Any]:
    """A bias of one element, of two ranks' parts of which one is empty, in a fragment by itself."""
    averagers = {
        "fp32": None,
        "bf16": Quantized(BFloat16()),
        "int8": Quantized(WholeNumbers(8)),
        "int4": Quantized(WholeNumbers(4), keeps_residual=True),
        "sparse": Sparse(0.1),
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 1))
    fully_shard(module, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    wire, outer = Wire(averagers[name], fragments=3), OuterSGD(1.0, 0.0)
    with DiLoCo(
        module, optimizer, 3, outer, mesh["worker"].get_group(), wire
    ) as diloco:  # fmt: skip
        for number in range(6):
            rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + runtime.rank))
            module(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        diloco.outer_step()
    return whole(module)


@pytest.mark.stranger
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "sparse"])
def test_a_rank_may_have_nothing_of_a_fragment(name: str) -> None:
    ranks = on_ranks(train_with_a_short_bias, 4, name)
    for found in ranks[1:]:
        for key, value in ranks[0].items():
            assert torch.equal(value, found[key]), key
    assert all(value.isfinite().all() for value in ranks[0].values())
