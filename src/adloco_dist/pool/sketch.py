"""A linear sketch of gradients: random signs, then a fold into a few thousand buckets (design, section 3.1)."""

import numpy as np
import torch

BUCKETS = 4093
"""Length r of a sketch. A prime: a power of two would line up with row lengths and lose a tenfold in accuracy."""
BLOCK_ELEMENTS = 16 * BUCKETS
"""Elements that one array of random words serves, with one bit of every word."""
CPU_BLOCKS = 4
"""Blocks that a CPU signs at once, so that the scratch stays in its cache; a GPU takes all that share their words."""


class Sketch:
    """P: R^d -> R^r with E |P g|^2 = |g|^2 to a relative error of about sqrt(2 / r); P is the same on every rank.

    Element i is multiplied by a random sign and added to bucket i mod r. Signs are single bits of random words:
    d / 8 bytes of them give every element a sign of its own, and taking one costs a shift, a mask and an xor. (A
    random float per element would cost 36 ms per million parameters; this costs 0.6.)
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._integer = torch.int32 if dtype == torch.float32 else torch.int64
        self._bits = torch.iinfo(self._integer).bits
        self._sign_bit = torch.iinfo(self._integer).min
        self._num_arrays = -(-num_elements // (self._bits * BLOCK_ELEMENTS))
        self._blocks = CPU_BLOCKS if device.type == "cpu" else self._bits
        self._scratch = torch.empty(self._blocks * BLOCK_ELEMENTS, dtype=self._integer, device=device)
        self._shifts = torch.arange(self._bits, dtype=self._integer, device=device)[:, None]
        self._words = torch.zeros(0, dtype=self._integer, device=device)

    def renew(self, *key: int) -> None:
        """Draw the signs that belong to `key`: the same on every machine."""
        num_draws = self._num_arrays * BLOCK_ELEMENTS * self._bits // 64
        draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(num_draws)
        words = torch.from_numpy(draws.view(np.int64)).view(self._integer)
        self._words = words.view(self._num_arrays, BLOCK_ELEMENTS).to(self._scratch.device)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """The sketch of `vector` (num_elements,), shape (BUCKETS,)."""
        sketch = torch.zeros(BUCKETS, dtype=vector.dtype, device=vector.device)
        for number, part in enumerate(vector.view(self._integer).split(len(self._scratch))):
            num_blocks = -(-len(part) // BLOCK_ELEMENTS)
            array, first_bit = divmod(number * self._blocks, self._bits)
            signed = self._scratch[: num_blocks * BLOCK_ELEMENTS]
            shifts = self._shifts[first_bit : first_bit + num_blocks]
            torch.bitwise_left_shift(self._words[array], shifts, out=signed.view(num_blocks, BLOCK_ELEMENTS))
            signed.bitwise_and_(self._sign_bit)
            signed[: len(part)].bitwise_xor_(part)
            signed[len(part) :].zero_()
            sketch += signed.view(vector.dtype).view(-1, BUCKETS).sum(0)
        return sketch
