"""How ranks sum what they have encoded, and what must be exact beside it, which travels in the same messages.

Two ranks send each other everything, and each sums: one exchange. Of more, each owns a slice of all payloads: it sums
that, encodes the sum, and sends it to the others: two exchanges, in which a rank sends at most twice its payload,
however many they are (the recipe of torchft's fp8 all-reduce and of MuLoCo, 2505.23725).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from adloco_dist.averaging.averager import Commit, is_counted
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.outer_sgd import chunks


class Encoding(Protocol):
    """How a vector becomes rows of bytes, and is read from them."""

    @property
    def row_elements(self) -> int:
        """Elements of the vector in a row."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of a vector, (n,): (num_rows, row_bytes) in uint8; the last one may be padded."""
        ...

    def add(self, rows: torch.Tensor, total: torch.Tensor, sign: int = 1) -> None:
        """Add what rows say to the vector that they are of."""
        ...


@dataclass(frozen=True)
class Part:
    """What one rank has of all payloads, or of a slice of them."""

    rows: torch.Tensor
    """(num_rows, row_bytes), uint8: blocks or chunks of elements, encoded."""
    exact: torch.Tensor
    """(num_exact,): elements that travel as they are."""


def exchange_encoded(
    encoding: Encoding,
    payload: torch.Tensor,
    num_exact: int,
    group: Group,
    residual: torch.Tensor | None,
    decay: float = 1.0,
) -> Commit:
    """`Averager.exchange`: what an encoding takes away from this rank's payload stays in its residual and, in the slice
    that this rank owns, what it takes away from the sum. Before, the residual is multiplied by `decay`."""
    values, exact = payload.split([len(payload) - num_exact, num_exact])
    if residual is not None:
        for chunk in chunks(len(values), values.device):
            values[chunk].add_(residual[chunk], alpha=decay)
    part = Part(encoding.encode(values), exact)
    own, left = slice(0), values[:0]
    if has_owners(len(group.ranks)):
        owned = slices_of(len(part.rows), len(group.ranks))[group.index]
        own = slice(encoding.row_elements * owned.start, encoding.row_elements * owned.stop)
        left = values[own].clone()

        def encoded_sum(messages: Sequence[torch.Tensor]) -> torch.Tensor:
            for place, message in enumerate(messages):
                if place != group.index:  # its own it has as it is
                    encoding.add(message, left)
            rows = encoding.encode(left)
            encoding.add(rows, left, sign=-1)
            return rows

        sums = [sum_by_owners(part, group, encoded_sum)]
    else:
        sums = gather(part, group)

    def commit() -> torch.Tensor:
        if residual is not None:
            residual.copy_(values)
            if is_counted(exact):
                encoding.add(part.rows, residual, sign=-1)
                residual[own] = left
        values.zero_()
        for rows in sums:
            encoding.add(rows, values)
        return payload

    if residual is None:  # the payload is not needed any more: decoded here, in the thread that averages
        commit()
        return lambda: payload
    return commit


def has_owners(num_ranks: int) -> bool:
    """Whether each of so many ranks sums a slice of its own, for all."""
    return num_ranks > 2


def slices_of(count: int, num_ranks: int) -> list[slice]:
    """The slices that ranks own of so many rows, or elements: as many on each, or one more."""
    return [slice(*pair) for pair in pairwise(count * number // num_ranks for number in range(num_ranks + 1))]


def gather(part: Part, group: Group) -> list[torch.Tensor]:
    """The rows of all ranks, in their order, which each sums for itself; the exact elements are replaced by their sums.

    Collective; every rank's part is as large.
    """
    everybody = [part] * len(group.ranks)
    arrived = _exchange(everybody, everybody, group)
    part.exact.copy_(_exact_sum(arrived))
    return [other.rows for other in arrived]


def sum_by_owners(part: Part, group: Group, encoded_sum: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    """The rows of the sum, from the owners of its slices; the exact elements are replaced by their sums. Collective.

    Args:
        encoded_sum: the rows of the sum in this rank's slice, of all ranks' rows there, in their order.
    """
    num_ranks = len(group.ranks)
    of_rows, of_exact = slices_of(len(part.rows), num_ranks), slices_of(len(part.exact), num_ranks)
    parts = [Part(part.rows[rows], part.exact[exact]) for rows, exact in zip(of_rows, of_exact, strict=True)]
    arrived = _exchange(parts, [parts[group.index]] * num_ranks, group)
    own = Part(encoded_sum([other.rows for other in arrived]), _exact_sum(arrived))
    sums = _exchange([own] * num_ranks, parts, group)
    part.exact.copy_(torch.cat([owned.exact for owned in sums]))
    return torch.cat([owned.rows for owned in sums])


def most_bytes_sent(num_rows: int, row_bytes: int, num_exact: int, num_ranks: int) -> int:
    """Bytes that a rank sends at most of a payload of so many rows and exact elements in fp32."""
    return _most_sent(num_rows, num_ranks) * row_bytes + _most_sent(num_exact, num_ranks) * 4


def _most_sent(count: int, num_ranks: int) -> int:
    """Of so many rows, what the owner of the largest slice sends: all but these, and their sum to every other."""
    return count + (num_ranks - 2) * -(-count // num_ranks)


def _exchange(sent: Sequence[Part], like: Sequence[Part], group: Group) -> list[Part]:
    """Send every other rank its part; what each has sent, which is as large as in `like`. In this rank's place is what
    it would have sent to itself. Collective."""
    messages: dict[int, torch.Tensor] = {}  # one that goes to several ranks is put together once
    for part in sent:
        if id(part) not in messages:
            messages[id(part)] = torch.cat([part.exact.view(torch.uint8), part.rows.flatten()])
    received = [other.rows.new_empty(other.exact.nbytes + other.rows.nbytes) for other in like]
    group.exchange_tensors([messages[id(part)] for part in sent], received)
    arrived = [_parted(message, other) for message, other in zip(received, like, strict=True)]
    arrived[group.index] = sent[group.index]
    return arrived


def _parted(message: torch.Tensor, like: Part) -> Part:
    exact, rows = message.split([like.exact.nbytes, like.rows.nbytes])
    return Part(rows.view(like.rows.shape), exact.view(like.exact.dtype))


def _exact_sum(parts: Sequence[Part]) -> torch.Tensor:
    """In the order of ranks, so that all who sum have the same bits."""
    total = parts[0].exact.clone()
    for part in parts[1:]:
        total.add_(part.exact)
    return total
