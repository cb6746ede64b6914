"""A linear sketch of gradients: random signs, then a fold into a few thousand buckets.

docs/theory.md, "What travels", has its errors.
"""

import hashlib

import torch

BUCKETS = 4093
"""Length r of a sketch. A prime: a power of two would line up with row lengths and multiply the error tenfold."""
BLOCK_ELEMENTS = 16 * BUCKETS
"""Elements that one array of random words serves, with one bit of every word."""
CPU_BLOCKS = 4
"""Blocks that a CPU signs at a time, so that the scratch stays in its cache; a GPU takes all that share their words."""


class Sketch:
    """P: R^d -> R^r with E |P g|^2 = |g|^2 to a relative error of about sqrt(2 / r); P is the same on every rank.

    Element i is multiplied by a random sign and added to bucket i mod r. Signs are single bits of random words:
    d / 8 bytes of them give every element a sign of its own, and taking one costs a shift, a mask and an xor. (A
    random float per element would cost 36 ms per million parameters; this costs 0.6.)
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        """Of vectors of d elements in fp32 or fp64, which their sketches have, too."""
        self._integer = torch.int32 if dtype == torch.float32 else torch.int64
        self._bits = torch.iinfo(self._integer).bits
        self._sign_bit = torch.iinfo(self._integer).min
        self._num_arrays = -(-num_elements // (self._bits * BLOCK_ELEMENTS))
        self._max_blocks = CPU_BLOCKS if device.type == "cpu" else self._bits
        self._scratch = torch.empty(self._max_blocks * BLOCK_ELEMENTS, dtype=self._integer, device=device)
        self._shifts = torch.arange(self._bits, dtype=self._integer, device=device)[:, None]
        self._words = torch.zeros(0, dtype=self._integer, device=device)

    def renew(self, *key: int) -> None:
        """Draw the signs that belong to `key`: the same on every machine."""
        digest = hashlib.blake2b(repr([int(number) for number in key]).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        num_draws = self._num_arrays * BLOCK_ELEMENTS * self._bits // 64
        draws = torch.empty(num_draws, dtype=torch.int64)
        draws.random_(torch.iinfo(torch.int64).min, None, generator=generator)  # all 64 bits
        self._words = draws.view(self._integer).view(self._num_arrays, BLOCK_ELEMENTS).to(self._scratch.device)

    def __call__(self, vector: torch.Tensor, first_element: int = 0) -> torch.Tensor:
        """The sketch of a vector, (BUCKETS,), or of a part of it: those of all parts add up to that of the whole.

        Args:
            vector: (n,), contiguous.
            first_element: index of its first element in the whole vector; first_element + n <= num_elements.
        """
        sketch = torch.zeros(BUCKETS, dtype=vector.dtype, device=vector.device)
        bits = vector.view(self._integer)
        start = 0
        while start < len(bits):
            block, offset = divmod(first_element + start, BLOCK_ELEMENTS)
            array, bit = divmod(block, self._bits)
            # From within a block to its end; from its beginning through as many as the scratch and the array hold.
            max_blocks = 1 if offset else min(self._max_blocks, self._bits - bit)
            part = bits[start : start + max_blocks * BLOCK_ELEMENTS - offset]
            num_blocks = -(-(offset + len(part)) // BLOCK_ELEMENTS)
            lead = offset % BUCKETS
            width = BLOCK_ELEMENTS if num_blocks > 1 else -(-(lead + len(part)) // BUCKETS) * BUCKETS
            words = self._words[array, offset - lead : offset - lead + width]
            signed = self._scratch[: num_blocks * width]
            shifts = self._shifts[bit : bit + num_blocks]
            torch.bitwise_left_shift(words, shifts, out=signed.view(num_blocks, width))
            signed.bitwise_and_(self._sign_bit)
            signed[lead : lead + len(part)].bitwise_xor_(part)
            signed[:lead].zero_()
            signed[lead + len(part) :].zero_()
            sketch += signed.view(vector.dtype).view(-1, BUCKETS).sum(0)
            start += len(part)
        return sketch
