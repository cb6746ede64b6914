"""Whole models that ranks build before they divide them: as many at one time as their node has memory for."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch import nn

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.setup.building import build_module
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, small_objective, small_settings, train_small_pool


def build_in_turn(runtime: Runtime, folder: str, rooms: dict[int, float]) -> dict[str, Any]:
    """Build with memory for so many models on each node, by node; how many had one at the same time there."""
    settings = small_settings(*FOUR_TRAINERS, "pool.ranks_per_worker=2", "+model.overrides.vocab_size=24")
    objective = small_objective(settings)
    node, build = runtime.nodes[runtime.rank], objective.build
    whole_bytes = objective.num_parameters().total * 8
    free = SimpleNamespace(available=rooms[node] * whole_bytes / 0.8 + 1)
    psutil.virtual_memory = lambda: free  # pyright: ignore[reportAttributeAccessIssue]
    most = 0

    def counted(*arguments: Any) -> nn.Module:
        nonlocal most
        mark = Path(folder) / f"{node}-{os.getpid()}"
        mark.touch()
        module = build(*arguments)
        most = len(list(Path(folder).glob(f"{node}-*")))
        mark.unlink()
        return module

    objective.build = counted  # pyright: ignore[reportAttributeAccessIssue]
    module = build_module(objective, settings, runtime)
    parts = [parameter.to_local().numel() for parameter in module.parameters()]  # pyright: ignore
    return {"most": most, "elements": sum(parts)}


@pytest.mark.parametrize("room", [1, 2, 100])
def test_no_more_build_at_once_than_there_is_room_for(room: int, tmp_path: Path) -> None:
    built = run_ranks(build_in_turn, [0, 0, 0, 0], str(tmp_path), {0: room}, ranks_per_worker=2)
    assert max(rank["most"] for rank in built) <= room
    whole = small_objective(small_settings("+model.overrides.vocab_size=24")).num_parameters().total
    assert [rank["elements"] for rank in built] == [whole // 2] * 4


def test_a_node_with_less_memory_takes_more_turns(tmp_path: Path) -> None:
    built = run_ranks(build_in_turn, [0, 0, 1, 1], str(tmp_path), {0: 0.5, 1: 9}, ranks_per_worker=2)
    assert max(rank["most"] for rank in built[:2]) == 1, "one, even where there is no room"


def refused(runtime: Runtime) -> str:
    memory = 1000 if runtime.rank else 10**9
    with pytest.raises(SettingsError) as raised:
        train_small_pool(runtime, *FOUR_TRAINERS, "inner=muon", f"cluster.memory_bytes={memory}")
    return str(raised.value)


def test_a_matrix_too_large_to_be_orthogonalised_where_it_lies() -> None:
    lines = set(run_ranks(refused, [0, 1]))
    (line,) = lines
    assert line.startswith("inner.optimizer=muon: ")
    assert "is orthogonalised in" in line
    assert "and there are 1 kB; use inner=adamw (on rank 1)" in line
