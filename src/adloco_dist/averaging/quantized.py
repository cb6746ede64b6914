"""Sums in few bits, which are taken in fp32; of more than two ranks the sum travels in the same few bits.

Whole numbers of 8 or 4 bits need no error feedback (Streaming DiLoCo, 2501.18512, trains 4B parameters with 4 bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.averager import Commit, is_counted
from adloco_dist.averaging.codecs import Codec, decode_into, encode, encode_sum, num_blocks
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.sums import Part, gather, has_owners, most_sent, sum_by_owners


@dataclass(frozen=True)
class Quantized:
    """Sums payloads in the codec's bits.

    A payload's elements are rounded as they are sent and, of more than two ranks, once more in the sum.
    """

    codec: Codec
    keeps_residual: bool = False
    """Whether what the first rounding takes away is added to the next payload (error feedback)."""

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        values, exact = payload.split([len(payload) - num_exact, num_exact])
        if residual is not None:
            values.add_(residual)
        sent = torch.empty(num_blocks(len(values)), self.codec.block_bytes, dtype=torch.uint8, device=values.device)
        encode(self.codec, values, sent)
        part = Part(sent, exact)
        if has_owners(len(group.ranks)):
            sums = [sum_by_owners(part, group, lambda messages: encode_sum(self.codec, messages, payload.dtype))]
        else:
            sums = gather(part, group)
        if residual is None:  # the payload is not needed any more: decoded here, in the thread that averages
            decode_into(self.codec, sums, values)
            return lambda: payload

        def commit() -> torch.Tensor:
            if is_counted(exact):
                decode_into(self.codec, [sent], residual)
                torch.sub(values, residual, out=residual)
            else:
                residual.copy_(values)
            decode_into(self.codec, sums, values)
            return payload

        return commit

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        rows = most_sent(num_blocks(num_elements - num_exact), len(ranks))
        return rows * self.codec.block_bytes + 4 * most_sent(num_exact, len(ranks))
