"""DiLoCo as published (2311.08105, Algorithm 1), written out plainly, and small modules to train with it."""

import copy
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from adloco_dist import OuterSGD, Wire
from adloco_dist.cluster.runtime import Runtime
from helpers.processes import run_ranks

WIDTH = 8
PLAIN = OuterSGD(lr=1.0, momentum=0.0)
STREAMING = {
    "plain": Wire(),
    "delayed": Wire(delay_updates=2),
    "in fragments": Wire(fragments=2),
    "in fragments, delayed": Wire(fragments=2, delay_updates=1),
}
Optimizers = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
TakeUpdate = Callable[[nn.Module, Sequence[torch.optim.Optimizer], int, int], None]


class Tied(nn.Module):
    """An embedding that is frozen, and a matrix that is used twice."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, width)
        self.embedding.weight.requires_grad = False
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.embedding(tokens))))))


class Normed(Tied):
    """The same with batch normalisation and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.full((3,), float("-inf")))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.first(self.embedding(tokens)))))


def batch(worker: int, update: int) -> torch.Tensor:
    """What a worker reads in an update: (6, 2), each row a token and the one to predict."""
    generator = torch.Generator().manual_seed(1000 * worker + update)
    return torch.randint(11, (6, 2), generator=generator)


def loss(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(rows[:, 0]), rows[:, 1])


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=5e-2, foreach=False)]


def sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)]


def adafactor(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(module.parameters(), lr=5e-2)]


def muon_beside_adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    muon = torch.optim.Muon([parameter for parameter in trained if parameter.ndim == 2], lr=5e-2)
    return [muon, torch.optim.AdamW([parameter for parameter in trained if parameter.ndim != 2], lr=5e-2)]


def update(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rows: torch.Tensor) -> None:
    """One inner update on one batch."""
    loss(module, rows).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def update_on_own_batch(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], worker: int, number: int
) -> None:
    """Update `number` of a worker, counted over all rounds."""
    update(module, optimizers, batch(worker, number))


def published(
    anchor: nn.Module, new_optimizers: Optimizers, num_workers: int, num_rounds: int, updates_per_round: int,
    take_update: TakeUpdate = update_on_own_batch,
) -> list[torch.Tensor]:  # fmt: skip
    """The anchor's parameters after so many rounds of DiLoCo, on modules and torch optimizers alone."""
    workers = [copy.deepcopy(anchor) for _ in range(num_workers)]
    inner = [new_optimizers(worker) for worker in workers]
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for t in range(num_rounds):
        for m, (worker, optimizers) in enumerate(zip(workers, inner, strict=True)):
            worker.load_state_dict(anchor.state_dict())
            for h in range(updates_per_round):
                take_update(worker, optimizers, m, t * updates_per_round + h)
        for x, *weights in zip(anchor.parameters(), *(worker.parameters() for worker in workers), strict=True):
            x.grad = torch.stack([x.data - w.data for w in weights]).mean(0) if x.requires_grad else None
        outer.step()
    return [parameter.detach() for parameter in anchor.parameters()]


def on_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """As `run_ranks`, for functions that return tensors."""
    return [torch.load(io.BytesIO(saved)) for saved in run_ranks(_saved, [0] * num_ranks, function, *arguments)]


def _saved(runtime: Runtime, function: Callable[..., Any], *arguments: Any) -> bytes:
    content = io.BytesIO()
    torch.save(function(runtime, *arguments), content)
    return content.getvalue()


def logged() -> list[str]:
    """What DiLoCo logs from now on, as it comes."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("adloco_dist.diloco").addHandler(handler)
    return lines


def values(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def same_on_all_ranks(module: nn.Module) -> bool:
    lowest = values(module)
    dist.broadcast(lowest, 0)
    is_same = torch.tensor(int(torch.equal(lowest, values(module))))
    dist.all_reduce(is_same, dist.ReduceOp.MIN)
    return bool(is_same)
