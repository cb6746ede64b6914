"""Entries are tensors or numbers of their owner, and come back as what they were."""

import pytest
import torch

from adloco_dist.schema import Entry, Kind, assign, gather

ENTRIES = (Entry("weights", Kind.vector), Entry("count", Kind.equal), Entry("is_late", Kind.equal))


class Owner:
    def __init__(self, weights: list[float], count: int, is_late: bool) -> None:
        self.weights, self.count, self.is_late = torch.tensor(weights), count, is_late


def test_what_was_gathered_is_assigned() -> None:
    first, second = Owner([1.0, 2.0], 2**40, True), Owner([0.0, 0.0], 0, False)
    saved, memory = gather(first, ENTRIES), second.weights
    assert saved["weights"] is first.weights
    assign(second, ENTRIES, saved)
    assert second.weights is memory
    assert memory.tolist() == [1.0, 2.0]
    assert (second.count, second.is_late) == (2**40, True)


def test_an_entry_that_is_missing() -> None:
    owner = Owner([1.0], 1, False)
    with pytest.raises(KeyError, match="is_late"):
        assign(owner, ENTRIES, {"weights": owner.weights, "count": torch.tensor(1)})
