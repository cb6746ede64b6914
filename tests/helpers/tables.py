"""Tables of sequences that tests look into."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from adloco_dist.data.tokens import TokenBatch, TokenTable


@dataclass(frozen=True)
class CountingTable(TokenTable):
    """Remembers which sequences were read."""

    read: list[int] = field(default_factory=list)

    def batch(self, ids: npt.NDArray[np.int64]) -> TokenBatch:
        self.read.extend(ids.tolist())
        return super().batch(ids)
