"""A small pool whose workers several ranks hold together, and its anchors as if nobody had divided them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import ClusterSettings
from adloco_dist.pool.local_pool import LocalPool
from helpers.processes import CPU_RANKS, run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS

ROWS = "+model.overrides.vocab_size=24"
"""A vocabulary that two and four ranks can share by rows, as all else: sketches are the same then."""
Anchors = dict[int, dict[str, npt.NDArray[np.float64]]]


def whole(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    """A parameter as all ranks that have parts of it have it together. Collective over them."""
    full = getattr(tensor, "full_tensor", lambda: tensor)()
    return full.detach().numpy(force=True).copy()


def whole_anchors(pool: LocalPool) -> Anchors:
    """The parameters of every trainer's anchor, by name."""
    found: Anchors = {}
    for trainer in pool.trainers.values():
        pool.flat_model.point_at(trainer.anchor.to(pool.flat_model.device))
        found[trainer.id] = {name: whole(one) for name, one in pool.flat_model.module.named_parameters()}
    return found


def train_whole(
    runtime: Runtime, folder: str, looks: int | None, overrides: list[str], module: nn.Module | None = None
) -> dict[str, Any]:
    """As `train_kept`, with the anchors whole."""
    pools: list[LocalPool] = []
    result = train_kept(runtime, folder, looks, *FOUR_TRAINERS, *overrides, prepare=pools.append, module=module)
    return {**result, "whole": whole_anchors(pools[0])}


def run_whole(
    size: int, num_seats: int, folder: Path, *overrides: str, looks: int | None = None,
    cluster: ClusterSettings = CPU_RANKS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train on seats of `size` ranks, from the newest checkpoint in the folder if there is one.

    Args:
        looks: how often a rank looks for a request to stop before it sees one; None: there is none.
        cluster: the ranks' devices and backend.
    """
    wanted = [ROWS, f"pool.ranks_per_worker={size}", "checkpoint.every=null", *overrides]
    nodes = [0] * (size * num_seats)
    return run_ranks(
        train_whole, nodes, str(folder), looks, wanted, cluster=cluster, ranks_per_worker=size
    )  # fmt: skip


def assert_equal(
    ranks: list[dict[str, Any]],
    reference: list[dict[str, Any]],
    is_resumed: bool = False,
    tolerance: float | None = None,
) -> None:
    """The same trainers, with the same anchors on all ranks, came to the same losses by the same batches.

    Args:
        is_resumed: the norm of what was under way at an interruption is in no record.
        tolerance: of parameters, and of figures relative to them; None: that of a model which computes in fp64.
    """
    held: Anchors = {trainer: one for rank in reference for trainer, one in rank["whole"].items()}
    assert held.keys() == {trainer for rank in ranks for trainer in rank["whole"]}
    for rank in ranks:
        for trainer, parameters in rank["whole"].items():
            assert parameters.keys() == held[trainer].keys()
            for name, value in parameters.items():
                np.testing.assert_allclose(value, held[trainer][name], rtol=0, atol=tolerance or 1e-11, err_msg=name)
    figures = (
        "train_loss",
        "validation_loss",
        "noise_scale",
        "request",
        *(() if is_resumed else ("pseudo_gradient_norm",)),
    )
    for row, expected in zip(ranks[0]["records"], reference[0]["records"], strict=True):
        for name in ("round", "trainer", "workers", "updates", "total_batch", "targets", "finite_workers", "cursor"):
            assert row.get(name) == expected.get(name), name
        for name in figures:
            if expected.get(name) is not None:
                np.testing.assert_allclose(row[name], expected[name], rtol=tolerance or 1e-9, err_msg=name)
