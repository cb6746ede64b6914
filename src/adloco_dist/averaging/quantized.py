"""Sums in few bits: every rank sums one slice of all payloads in fp32, and its sum travels in the same few bits.

Quantise, all-to-all, sum, quantise, all-gather: the recipe of torchft's fp8 all-reduce and of MuLoCo (2505.23725).
Whole numbers of 8 or 4 bits need no error feedback (Streaming DiLoCo, 2501.18512, trains 4B parameters with 4 bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.averager import Commit, is_counted
from adloco_dist.averaging.codecs import Codec, decode_into, encode, encode_sum, num_blocks
from adloco_dist.averaging.group import Group, ring_bytes_sent


@dataclass(frozen=True)
class Quantized:
    """Sums payloads in the codec's bits.

    A payload's elements are rounded twice: as they are sent to the rank that sums them, and in the sum.
    """

    codec: Codec
    keeps_residual: bool = False
    """Whether what the first rounding takes away is added to the next payload (error feedback)."""

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        values, exact = payload.split([len(payload) - num_exact, num_exact])
        pending = group.start_all_reduce(exact) if num_exact else None
        if residual is not None:
            values.add_(residual)
        num_ranks, size = len(group.ranks), _slice_blocks(len(values), len(group.ranks))
        sent = torch.empty(num_ranks * size, self.codec.block_bytes, dtype=torch.uint8, device=values.device)
        encode(self.codec, values, sent)
        received = group.exchange_parts(sent.view(num_ranks, size, self.codec.block_bytes))
        encode_sum(self.codec, received, payload.dtype)
        sums = group.all_gather(received[0]).flatten(0, 1)
        if pending:
            pending.wait()
        if residual is None:  # the payload is not needed any more: decoded here, in the thread that averages
            decode_into(self.codec, sums, values)
            return lambda: payload

        def commit() -> torch.Tensor:
            if is_counted(exact):
                decode_into(self.codec, sent, residual)
                torch.sub(values, residual, out=residual)
            else:
                residual.copy_(values)
            decode_into(self.codec, sums, values)
            return payload

        return commit

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        num_ranks = len(ranks)
        message = _slice_blocks(num_elements - num_exact, num_ranks) * self.codec.block_bytes
        return 2 * (num_ranks - 1) * message + ring_bytes_sent(4 * num_exact, num_ranks)


def _slice_blocks(num_elements: int, num_ranks: int) -> int:
    """Blocks that each rank sums: as many on all, the last ones of which may be empty."""
    return -(-num_blocks(num_elements) // num_ranks)
