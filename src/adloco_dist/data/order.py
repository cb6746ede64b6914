"""Orders that are the same on every machine."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from adloco_dist.data.encoding import Text

AnyText = TypeVar("AnyText", str, bytes, Text)


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of range(count), the same on every machine and numpy version for the same key.

    The raw streams of numpy's bit generators are stable by contract; `Generator.permutation` is not.
    """
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(draws, kind="stable")


def content_key(text: Text) -> bytes:
    """What documents are ordered by, so that a split does not depend on where a node keeps its files."""
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode(errors="replace")).digest()


def by_content(texts: Sequence[AnyText], fraction: float) -> tuple[list[AnyText], list[AnyText]]:
    """Texts to train on, in their order, and `fraction` of them to hold out, at least one; none is in both."""
    ordered = sorted(texts, key=content_key)
    held_out = ordered[: min(max(1, round(fraction * len(texts))), len(texts) - 1)]
    chosen = set(held_out)
    return [text for text in texts if text not in chosen], held_out
