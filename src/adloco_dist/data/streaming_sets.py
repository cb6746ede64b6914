"""Streaming sets of Hugging Face's `datasets` as streams that continue exactly where they stopped."""

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

BUFFER = "BufferShuffledExamplesIterable"
"""The class of `datasets` that shuffles rows in memory; its state does not hold the rows that wait there."""


class StreamingSet:
    """A `datasets.IterableDataset` with an exact state.

    Its own state is exact unless rows wait in a shuffling buffer. Then the state is the number of rows that were given
    in this pass, and those are read again before the next one. Its `__iter__` begins again at the state that was
    loaded, however often it is called; here, a pass that has ended is followed by one from the beginning.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._keeps_its_place = not _shuffles(getattr(dataset, "_ex_iterable", None))
        self._num_given = 0
        self._place: Any = None
        """The data set's own state, where no row was given since it was loaded."""

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._dataset)
        for row in rows if self._keeps_its_place else islice(rows, self._num_given, None):
            self._num_given += 1
            self._place = None
            yield row
        self.load_state_dict({"rows": 0, "place": None})

    def state_dict(self) -> dict[str, Any]:
        place = self._place
        if place is None and self._keeps_its_place and self._num_given:
            place = self._dataset.state_dict()
        return {"rows": self._num_given, "place": place}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._num_given, self._place = state_dict["rows"], state_dict["place"]
        self._dataset.load_state_dict(self._place)


def is_streaming_set(made: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`, without importing `datasets`, which takes seconds."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(made, datasets.IterableDataset)


def _shuffles(source: Any) -> bool:
    """Whether a source of rows, or one that it reads from, shuffles rows in memory; of an unknown one: yes."""
    if source is None:
        return True
    inner = [*getattr(source, "ex_iterables", ()), *filter(None, [getattr(source, "ex_iterable", None)])]
    return type(source).__name__ == BUFFER or any(map(_shuffles, inner))
