"""Sums of the largest elements alone, in 2 bits each, with error feedback (SparseLoCo, 2508.15706).

Of every chunk of 4,096 elements the largest travel: 12 bits for the place of each, 2 for its value. With 64 of them
that is 0.23 bits for each element of the vector. What has not been sent stays in the residual, which decays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.averager import Commit
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.sums import exchange_encoded, most_bytes_sent

CHUNK = 4096
"""Elements of which the largest are sent; 12 bits say which."""
SCALES_BYTES = 4
"""Two magnitudes of a chunk, in bfloat16."""


@dataclass(frozen=True)
class Sparse:
    """Sums the largest elements of payloads.

    A value is one of two magnitudes with a sign: the mean of the chunk's larger ones, and that of its smaller ones,
    divided at the middle of their range.
    """

    fraction: float = 64 / CHUNK
    """Share of the elements that is sent, in (0, 1]; in every chunk a multiple of eight."""
    decay: float = 0.95
    """What a residual is multiplied by before the next payload is added, in [0, 1]."""
    keeps_residual: bool = True
    """Whether what has not been sent is added to the next payload; without it most of the training is lost."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: must be in (0, 1]")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay}: must be in [0, 1]")

    @property
    def row_elements(self) -> int:
        return CHUNK

    @property
    def num_sent(self) -> int:
        """Elements of a chunk that are sent; eight of them fill whole words of 16 bits."""
        return 8 * max(1, round(self.fraction * CHUNK / 8))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's message."""
        return SCALES_BYTES + self.num_sent * 14 // 8

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        return exchange_encoded(self, payload, num_exact, group, residual, self.decay)

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        num_chunks = -(-(num_elements - num_exact) // CHUNK)
        return most_bytes_sent(num_chunks, self.chunk_bytes, num_exact, len(ranks))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        missing = -len(values) % CHUNK
        rows = torch.cat([values, values.new_zeros(missing)]) if missing else values
        rows = rows.view(-1, CHUNK)
        places = rows.abs().topk(self.num_sent, dim=1, sorted=False).indices.sort(dim=1).values
        chosen = rows.gather(1, places)
        sizes = chosen.abs()
        low, high = sizes.aminmax(dim=1, keepdim=True)
        is_large = sizes > low + (high - low) / 2
        num_large = is_large.sum(1)
        large = torch.where(is_large, sizes, 0).sum(1) / num_large.clamp(min=1)
        small = torch.where(is_large, 0, sizes).sum(1) / (self.num_sent - num_large).clamp(min=1)
        scales = torch.stack([small, large], dim=1).to(torch.bfloat16).view(torch.uint8)
        codes = is_large.to(torch.uint8) | (chosen < 0).to(torch.uint8) << 1
        return torch.cat([scales, _packed_places(places), _packed_codes(codes)], dim=1)

    def decode(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was sent: the places in the vector and the values in fp32, (num_chunks, num_sent) each."""
        ends = SCALES_BYTES, SCALES_BYTES + self.num_sent * 3 // 2
        scales = message[:, : ends[0]].contiguous().view(torch.bfloat16).float()
        places = _unpacked_places(message[:, ends[0] : ends[1]])
        codes = _unpacked_codes(message[:, ends[1] :])
        values = scales.gather(1, (codes & 1).long())
        starts = torch.arange(len(message), device=message.device).unsqueeze(1) * CHUNK
        return places + starts, torch.where(codes > 1, -values, values)

    def add(self, rows: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        places, values = self.decode(rows)
        values = (values * sign).to(total.dtype)
        whole = len(total) // CHUNK  # behind the vector's end the last chunk was filled up with zeros
        total[places[:whole].view(-1)] += values[:whole].view(-1)  # no place is there twice
        for place, value in zip(places[whole:], values[whole:], strict=True):
            inside = place < len(total)
            total[place[inside]] += value[inside]


def _packed_places(places: torch.Tensor) -> torch.Tensor:
    """Places below 4,096, an even number in each row, as 3 bytes for two."""
    first, second = places[:, ::2], places[:, 1::2]
    parts = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
    return torch.stack(parts, dim=2).flatten(1).to(torch.uint8)


def _unpacked_places(content: torch.Tensor) -> torch.Tensor:
    low, middle, high = content.long().unflatten(1, (content.shape[1] // 3, 3)).unbind(2)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=2).flatten(1)


def _packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 4, a multiple of four in each row, as a byte for four."""
    first, second, third, fourth = codes.unflatten(1, (codes.shape[1] // 4, 4)).unbind(2)
    return first | second << 2 | third << 4 | fourth << 6


def _unpacked_codes(content: torch.Tensor) -> torch.Tensor:
    return torch.stack([content >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)
