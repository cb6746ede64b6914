"""Sums in few bits, which are taken in fp32; of more than two ranks the sum travels in the same few bits.

Whole numbers of 8 or 4 bits need no error feedback (Streaming DiLoCo, 2501.18512, trains 4B parameters with 4 bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.averager import Commit
from adloco_dist.averaging.codecs import BLOCK, CHUNK_BLOCKS, Codec, num_blocks
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.sums import exchange_encoded, most_bytes_sent


@dataclass(frozen=True)
class Quantized:
    """Sums payloads in the codec's bits.

    A payload's elements are rounded as they are sent and, of more than two ranks, once more in the sum.
    """

    codec: Codec
    keeps_residual: bool = False
    """Whether what rounding takes away is added to the next payload (error feedback)."""

    @property
    def row_elements(self) -> int:
        return BLOCK

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        return exchange_encoded(self, payload, num_exact, group, residual)

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        num_rows = num_blocks(num_elements - num_exact)
        return most_bytes_sent(num_rows, self.codec.block_bytes, num_exact, len(ranks))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        shape = num_blocks(len(values)), self.codec.block_bytes
        rows = torch.empty(shape, dtype=torch.uint8, device=values.device)
        for start in range(0, len(rows), CHUNK_BLOCKS):
            chunk = rows[start : start + CHUNK_BLOCKS]
            blocks = values[start * BLOCK : (start + len(chunk)) * BLOCK]
            if missing := len(chunk) * BLOCK - len(blocks):
                blocks = torch.cat([blocks, blocks.new_zeros(missing)])
            self.codec.encode(blocks.view(-1, BLOCK), chunk)
        return rows

    def add(self, rows: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        for start in range(0, len(rows), CHUNK_BLOCKS):
            chunk = total[start * BLOCK : (start + CHUNK_BLOCKS) * BLOCK]
            chunk.add_(self.codec.decode(rows[start : start + CHUNK_BLOCKS]).view(-1)[: len(chunk)], alpha=sign)
