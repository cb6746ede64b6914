"""Pseudo-gradients in fewer bits: blocks of whole numbers or signs with one scale each, or bfloat16."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

BLOCK = 128
"""Elements with one scale: 16 bits for 128 elements are an eighth of a bit for each."""
GATHER_BITS = sum(1 << 56 - 7 * place for place in range(8))
"""Times eight bytes of 0 or 1, in a word of 64 bits: its highest byte has them as bits, the first as the lowest."""
CHUNK_BLOCKS = 1024
"""Blocks that are encoded at one time: what one operation leaves in a cache the next finds there."""


class Codec(Protocol):
    """Encodes blocks of `BLOCK` elements in `block_bytes` bytes each, and decodes them to the same bits everywhere."""

    @property
    def block_bytes(self) -> int: ...

    def encode(self, blocks: torch.Tensor, message: torch.Tensor) -> None:
        """Fill a message, (num_blocks, block_bytes) in uint8, with values, (num_blocks, BLOCK)."""
        ...

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """The values in such a message, (num_blocks, BLOCK) in fp32."""
        ...


@dataclass(frozen=True)
class BFloat16:
    """Values rounded to bfloat16: 8 bits of mantissa, the range of fp32."""

    @property
    def block_bytes(self) -> int:
        return 2 * BLOCK

    def encode(self, blocks: torch.Tensor, message: torch.Tensor) -> None:
        message.view(torch.bfloat16).copy_(blocks)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        return message.view(torch.bfloat16).float()


@dataclass(frozen=True)
class WholeNumbers:
    """Values as whole numbers of `bits` bits, from -L to L, times the scale of their block, in bfloat16.

    The scale is the block's largest magnitude over L, rounded up: a value errs by at most half of it, at most the
    block's largest magnitude times (1 + 2^-7) / 2L (L is 7 for 4 bits, 127 for 8). A block with a value that is not
    finite decodes to values that are none.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits}: must be 4 or 8")

    @property
    def levels(self) -> int:
        """L, the largest whole number."""
        return (1 << self.bits - 1) - 1

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.bits // 8 + 2

    def encode(self, blocks: torch.Tensor, message: torch.Tensor) -> None:
        scales = _rounded_up(blocks.abs().amax(1).float() / self.levels)
        message[:, -2:] = scales.unsqueeze(1).view(torch.uint8)
        # Zeros have the scale zero.
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales).to(blocks.dtype)
        # Offset by L + 1, so that they are never negative.
        numbers = (blocks / divisors.unsqueeze(1)).round_().add_(self.levels + 1).to(torch.uint8)
        if self.bits == 4:  # the second half of a block takes the upper bits
            low, high = numbers.split(BLOCK // 2, dim=1)
            numbers = low.add_(high.mul_(16))
        message[:, :-2] = numbers

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        scales = message[:, -2:].contiguous().view(torch.bfloat16).float()
        numbers = message[:, :-2]
        if self.bits == 4:
            numbers = torch.cat([numbers & 15, numbers >> 4], dim=1)
        return numbers.float().sub_(self.levels + 1).mul_(scales)


@dataclass(frozen=True)
class Signs:
    """Signs of values, times the mean magnitude of their block, in bfloat16 (1-bit Adam, 2102.02888).

    Of normally distributed values that takes all but a third of their squares. It needs error feedback. A block with a
    value that is not finite decodes to values that are none.
    """

    @property
    def block_bytes(self) -> int:
        return BLOCK // 8 + 2

    def encode(self, blocks: torch.Tensor, message: torch.Tensor) -> None:
        message[:, -2:] = blocks.abs().mean(1, keepdim=True).to(torch.bfloat16).view(torch.uint8)
        words = (blocks >= 0).view(torch.int64)  # a byte for each of eight
        message[:, :-2] = (words * GATHER_BITS >> 56).to(torch.uint8)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        scales = message[:, -2:].contiguous().view(torch.bfloat16).float()
        return (
            _signs_of_bytes(message.device)
            .index_select(0, message[:, :-2].flatten().int())
            .view(-1, BLOCK)
            .mul_(scales)
        )


@cache
def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    """The signs in every byte, (256, 8), the lowest bit's first: made once, as each chunk of a message is decoded."""
    places = torch.arange(8, device=device)
    return (torch.arange(256, device=device).unsqueeze(1) >> places & 1).float().mul_(2).sub_(1)


def _rounded_up(values: torch.Tensor) -> torch.Tensor:
    """Non-negative fp32 values as the next bfloat16 that is not smaller; what is not finite stays so."""
    upper = ((values.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), upper, values.to(torch.bfloat16))


def num_blocks(num_elements: int) -> int:
    """Blocks that hold so many elements."""
    return -(-num_elements // BLOCK)
