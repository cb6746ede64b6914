"""The library by itself: what it needs, what it takes, and what a stranger may put into it."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import nn

import adloco_dist
from adloco_dist import DiLoCo, Wire
from adloco_dist.averaging.averager import Commit
from adloco_dist.averaging.checks import checksum
from adloco_dist.averaging.group import Group, group_of
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.pool.capacity import PeakBytes
from helpers.plain import Tied, adamw, batch, on_ranks, sgd, update

ALONE = """
import sys
from importlib.util import find_spec
ABSENT = ("hydra", "omegaconf", "transformers", "datasets", "wandb", "numpy", "psutil", "rich")
assert not [name for name in ABSENT if find_spec(name)]
import adloco_dist
assert "torch" not in sys.modules
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
with adloco_dist.DiLoCo(model, optimizer, updates_per_round=1, outer=adloco_dist.OuterSGD()) as diloco:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print(diloco.round, diloco.last_step.num_finite, diloco.last_step.bytes_sent, *diloco.state_dict()["anchor"])
"""


def packages_of_torch(folder: Path) -> Path:
    """A folder to import torch from, with what it requires and nothing else: links to what is installed here."""
    pending, found = ["torch"], set[str]()
    while pending:
        name = pending.pop()
        found.add(name)
        package = metadata.distribution(name)
        for requirement in map(Requirement, package.requires or ()):
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_needed and requirement.name not in found:
                pending.append(requirement.name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(package.locate_file(top)))
    return folder


def test_it_needs_torch_alone(tmp_path: Path) -> None:
    source = Path(adloco_dist.__file__).parent
    (tmp_path / "packages").mkdir()
    packages = packages_of_torch(tmp_path / "packages")
    (packages / source.name).symlink_to(source)
    # torch warns of the lack of numpy.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", "-c", ALONE, str(tmp_path / "store")]
    output = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert output.returncode == 0, output.stderr
    assert output.stdout == "1 1.0 0 weight bias\n"


class HalfPrecision:
    """A stranger's averager, in one file: payloads travel in bf16, and what rounding takes from them next time.

    Two ranks exchange what they have, and both decode both parts.
    """

    keeps_residual = True

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        assert residual is not None
        whole = payload[:-num_exact] + residual
        code = whole.bfloat16()
        codes = [torch.empty_like(code) for _ in group.ranks]
        dist.all_gather(codes, code, group=group.process_group)
        group.all_reduce(payload)

        def commit() -> torch.Tensor:
            torch.sub(whole, code, out=residual)
            payload[:-num_exact] = torch.stack(codes).float().sum(0)
            return payload

        return commit

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        return 2 * num_elements * (len(ranks) - 1)


def train_compressed(runtime: Runtime, is_compressed: bool) -> dict[str, Any]:
    module = Tied()
    optimizers = sgd(module)
    averager = HalfPrecision() if is_compressed else None
    with DiLoCo(module, optimizers, updates_per_round=2, wire=Wire(averager)) as diloco:
        for number in range(8):
            update(module, optimizers, batch(runtime.rank, number))
    assert diloco.last_step
    return {"bytes": diloco.last_step.bytes_sent, "module": module.state_dict(), "state": diloco.state_dict()}


def test_an_averager_of_ones_own_is_one_class() -> None:
    (exact, _), (one, other) = on_ranks(train_compressed, 2, False), on_ranks(train_compressed, 2, True)
    assert one["bytes"] * 2 == other["bytes"] * 2 == exact["bytes"]
    for name, tensor in exact["module"].items():
        assert torch.equal(one["module"][name], other["module"][name])
        torch.testing.assert_close(one["module"][name], tensor, rtol=0, atol=0.02)
    assert not torch.equal(one["module"]["head.weight"], exact["module"]["head.weight"])
    assert one["state"]["residual"]["worker 0 of 2"].abs().sum() > 0


def peak_bytes(train: Callable[[nn.Module, list[torch.optim.Optimizer], int], None], rank: int) -> int:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizers = adamw(module)
    with PeakBytes(list(module.parameters())) as counter:
        train(module, optimizers, rank)
    return counter.peak


def take_updates(module: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int) -> None:
    for _ in range(2):
        module(torch.full((4, 64), 1.0 + rank)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def with_diloco(module: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int) -> None:
    with DiLoCo(module, optimizers, updates_per_round=2):
        for _ in range(3):
            take_updates(module, optimizers, rank)


def by_hand(module: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int) -> None:
    anchor = [parameter.detach().clone() for parameter in module.parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    for _ in range(3):
        take_updates(module, optimizers, rank)
        with torch.no_grad():
            delta = torch.cat([(x - w).flatten() for x, w in zip(anchor, module.parameters(), strict=True)])
            dist.all_reduce(delta, op=dist.ReduceOp.AVG)
            for x, part in zip(anchor, delta.split([x.numel() for x in anchor]), strict=True):
                x.grad = part.view_as(x)
            outer.step()
            outer.zero_grad()
            for x, w in zip(anchor, module.parameters(), strict=True):
                w.copy_(x)


def peaks(runtime: Runtime) -> tuple[int, int]:
    return peak_bytes(with_diloco, runtime.rank), peak_bytes(by_hand, runtime.rank)


def test_it_takes_no_more_memory_than_by_hand() -> None:
    for ours, hand in on_ranks(peaks, 2):
        assert ours <= hand


def exchange(runtime: Runtime, text: str) -> tuple[list[list[int]], list[str]]:
    group = group_of(None, torch.device("cpu"), 60.0)
    assert group
    numbers = [runtime.rank, -(2**62) - runtime.rank]
    return group.exchange(numbers), group.exchange_text(text * runtime.rank)


def test_ranks_exchange_whole_numbers_and_texts() -> None:
    for numbers, texts in on_ranks(exchange, 3, "häé\n"):
        assert numbers == [[rank, -(2**62) - rank] for rank in range(3)]
        assert texts == ["", "häé\n", "häé\nhäé\n"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 20_000])
def test_the_checksum_takes_any_dense_tensor(dtype: torch.dtype, length: int) -> None:
    tensor = torch.randint(2, (length + 1,), generator=torch.Generator().manual_seed(0)).to(dtype)[1:]
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    assert checksum(tensor.repeat(2, 1).T[:, 1]) == before
    for index in {0, length // 2, length - 1} if length else ():
        changed = tensor.clone()
        changed[index] = 1 - changed[index].to(torch.complex128).real
        assert checksum(changed) != before
