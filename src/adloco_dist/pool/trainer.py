"""A trainer's share on this rank, with all its state."""

import torch

from adloco_dist.config import OuterState, Settings
from adloco_dist.data.shards import Shard
from adloco_dist.pool.flat_model import FlatModel, new_outer_vector
from adloco_dist.pool.worker import Worker


class Trainer:
    """Trainer `id`: its anchor, outer optimizer and shard (equal on all its ranks), and the workers hosted here.

    The outer optimizer is torch's SGD on the anchor, with the pseudo-gradient as its gradient (DiLoCo, 2311.08105,
    Algorithm 1, line 14).
    """

    def __init__(
        self, id: int, workers: list[int], initial_weights: torch.Tensor, flat_model: FlatModel, shard: Shard,
        settings: Settings,
    ) -> None:  # fmt: skip
        outer = settings.outer
        self.id = id
        self.shard = shard
        self.flat_model = flat_model
        self.anchor = new_outer_vector(initial_weights, settings.pool.outer_state is OuterState.cpu)
        self.outer_optimizer = torch.optim.SGD(
            [self.anchor], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov, fused=True
        )
        self.workers = [Worker(worker, initial_weights, flat_model, settings.inner) for worker in workers]

    def checksum(self) -> list[int]:
        """Two integer checksums over the bits of the anchor; equal on all ranks of the trainer (invariant 3).

        The first is their sum, the second weighs every 32-bit word by its place in a row and by its row, so that
        exchanged words are seen too. Taken where the anchor lives; both wrap modulo 2^64.
        """
        row_words = 4096
        bits = self.anchor.view(torch.int32)
        whole = bits[: len(bits) // row_words * row_words].view(-1, row_words)
        rest = bits[whole.numel() :]
        row_sums, column_sums = whole.sum(1, dtype=torch.int64), whole.sum(0, dtype=torch.int64)
        total = row_sums.sum() + rest.sum(dtype=torch.int64)
        weighted = (row_sums * _places(row_sums)).sum() + 31 * (column_sums * _places(column_sums)).sum()
        weighted += 61 * (rest.to(torch.int64) * _places(rest)).sum()
        return [int(total), int(weighted)]


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, len(like) + 1, device=like.device)
