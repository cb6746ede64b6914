"""A user's script: a model, data and a loss of one's own, and the launcher. With STREAM set, the data are streams."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from adloco_dist.launch import launch


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random points, and on which side of a plane they are."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(16, generator=torch.Generator().manual_seed(self._start + index))
        return point, (point[:4].sum() > 0).long()


class PartOfPoints:
    """Every `count`-th of the points, from the `index`-th on."""

    def __init__(self, index: int, count: int) -> None:
        self._points = Points(0, 4000)
        self._numbers, self._next = range(index, len(self._points), count), 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < len(self._numbers):
            self._next += 1
            yield self._points[self._numbers[self._next - 1]]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 2))


def data() -> Any:
    return PartOfPoints if "STREAM" in os.environ else Points(0, 4000), Points(4000, 4500)


def loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    points, sides = batch
    return nn.functional.cross_entropy(module(points), sides, reduction="sum"), len(sides)


if __name__ == "__main__":
    launch(model=model, data=data, loss=loss)
