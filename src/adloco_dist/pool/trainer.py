"""A trainer's share on this rank, with all its state."""

from collections.abc import Mapping

import torch

from adloco_dist.config import OuterState, Settings
from adloco_dist.data.corpora import TrainerShard
from adloco_dist.pool.flat_model import FlatModel, new_outer_vector
from adloco_dist.pool.worker import Worker

CHECKSUM_ROW_WORDS = 2048


class Trainer:
    """Trainer `id`: its anchor, outer momentum and shard (equal on all its ranks), and the workers hosted here.

    Attributes:
        anchor: (num_elements,), on the rank's device, or in CPU memory (pool.outer_state=cpu).
        momentum: of the outer SGD (DiLoCo, 2311.08105, Algorithm 1, line 14), as large and in the same place, zeros
            at first; None: there is none.
    """

    def __init__(
        self, id: int, workers: list[Worker], initial_weights: torch.Tensor, flat_model: FlatModel, shard: TrainerShard,
        settings: Settings,
    ) -> None:  # fmt: skip
        self.id = id
        self.workers = workers
        self.shard = shard
        self.flat_model = flat_model
        self.outer = settings.outer
        on_cpu = settings.pool.outer_state is OuterState.cpu
        self.anchor = new_outer_vector(initial_weights, on_cpu)
        self.momentum = new_outer_vector(torch.zeros_like(initial_weights), on_cpu) if self.outer.momentum else None

    @property
    def outer_vectors(self) -> list[torch.Tensor]:
        """What a merge averages: the anchor, and the momentum if there is any."""
        return [self.anchor] if self.momentum is None else [self.anchor, self.momentum]

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the outer state, by name: these very tensors."""
        return dict(zip(("anchor", "momentum"), self.outer_vectors, strict=False))

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Become what `state` was taken of.

        Raises:
            KeyError: a part of it is missing.
        """
        for name, vector in self.state().items():
            vector.copy_(state[name])

    @property
    def is_finite(self) -> bool:
        """Whether the anchor is; the momentum then is too, for every step adds it to the anchor."""
        return bool(torch.isfinite(self.anchor.sum()))

    def checksum(self) -> list[int]:
        """Two integer checksums over the bits of the anchor; equal on all ranks of the trainer (invariant 3).

        The first is the sum of its 64-bit words, the second weighs every word by its row and by its place in the
        row, so that exchanged words are seen too. Taken where the anchor lives, without widening a word (a sum
        that converts is 30 times slower); both wrap modulo 2^64.
        """
        words = self.anchor.view(torch.int64)
        whole = words[: len(words) // CHECKSUM_ROW_WORDS * CHECKSUM_ROW_WORDS].view(-1, CHECKSUM_ROW_WORDS)
        rest = words[whole.numel() :]
        row_sums = torch.cat([whole.sum(1), rest.sum(0, keepdim=True)])
        place_sums = whole.sum(0)
        place_sums[: len(rest)] += rest
        places = torch.arange(1, max(len(row_sums), CHECKSUM_ROW_WORDS) + 1, device=words.device)
        weighted = (row_sums * places[: len(row_sums)]).sum() + (place_sums * places[:CHECKSUM_ROW_WORDS]).sum() * 31
        return torch.stack([row_sums.sum(), weighted]).tolist()
