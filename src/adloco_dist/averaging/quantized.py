"""Sums in few bits: every rank sums one slice of all payloads in fp32, and its sum travels in the same few bits.

Quantise, all-to-all, sum, quantise, all-gather: the recipe of torchft's fp8 all-reduce and of MuLoCo (2505.23725).
Whole numbers of 8 or 4 bits need no error feedback (Streaming DiLoCo, 2501.18512, trains 4B parameters with 4 bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.averager import is_counted
from adloco_dist.averaging.codecs import BLOCK, Codec, decode_into, encode, num_blocks
from adloco_dist.averaging.group import Group, ring_bytes_sent


@dataclass(frozen=True)
class Quantized:
    """Sums payloads in the codec's bits.

    A payload's elements are rounded twice: as they are sent to the rank that sums them, and in the sum.
    """

    codec: Codec
    keeps_residual: bool = False
    """Whether what the first rounding takes away is added to the next payload (error feedback)."""

    def all_reduce(
        self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None
    ) -> torch.Tensor:
        values, exact = payload.split([len(payload) - num_exact, num_exact])
        pending = group.start_all_reduce(exact) if num_exact else None
        slices = values.split(_slice_blocks(len(values), len(group.ranks)) * BLOCK)
        sent = self._encoded(values, len(group.ranks), residual)
        received = group.exchange_parts(sent)
        mine = group.index
        total = slices[mine] if mine < len(slices) else values[:0]  # of few blocks, the last ranks have none
        for index, message in enumerate(received):
            decode_into(self.codec, message, total, is_first=index == 0)
        encode(self.codec, total, received[0])
        for message, part in zip(group.all_gather(received[0]), slices, strict=False):
            decode_into(self.codec, message, part)
        if pending:
            pending.wait()
        if residual is not None and not is_counted(exact):
            decode_into(self.codec, sent.flatten(0, 1), residual, is_first=False)
        return payload

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        num_ranks = len(ranks)
        message = _slice_blocks(num_elements - num_exact, num_ranks) * self.codec.block_bytes
        return 2 * (num_ranks - 1) * message + ring_bytes_sent(4 * num_exact, num_ranks)

    def _encoded(self, values: torch.Tensor, num_ranks: int, residual: torch.Tensor | None) -> torch.Tensor:
        """The values as one message for each rank, (num_ranks, blocks of a slice, block_bytes)."""
        size = _slice_blocks(len(values), num_ranks)
        message = torch.empty(num_ranks * size, self.codec.block_bytes, dtype=torch.uint8, device=values.device)
        if residual is not None:
            values = values.add_(residual)
        encode(self.codec, values, message)
        if residual is not None:
            decode_into(self.codec, message, residual)
            torch.sub(values, residual, out=residual)
        return message.view(num_ranks, size, self.codec.block_bytes)


def _slice_blocks(num_elements: int, num_ranks: int) -> int:
    """Blocks that each rank sums: as many on all, the last ones of which may be empty."""
    return -(-num_blocks(num_elements) // num_ranks)
