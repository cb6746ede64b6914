"""What shows that ranks have drifted apart, and the errors that end a run."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from adloco_dist.averaging.group import Group, GroupError
from adloco_dist.text import first_difference, first_line, ranks_by_value, ranks_in_words
from adloco_dist.vectors import shape_in_words

CHECKSUM_ROW_WORDS = 64
LOST_CONNECTION = (
    "connection closed",
    "connection reset",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "remote process exit",
)
"""Words of gloo, torch's store and NCCL for a lost connection."""
TRANSPORTS = ("gloo/transport", "nccl")
"""What their other errors name."""
RESTART = "restart all ranks, and load the last state_dict"


class RanksDisagreeError(RuntimeError):
    """Ranks that must hold the same anchor hold different ones: training must stop. Its line names them."""


class PeerLostError(RuntimeError):
    """Another rank is gone, or did not come in time. Its line says when, among which ranks, and what to do."""


@contextmanager
def contact(
    ranks: Sequence[int], where: str, timeout_seconds: float, who_left: Callable[[], str | None] | None = None
) -> Iterator[None]:
    """Report another rank that is gone or late as such, from the collectives in the block; no other error.

    Args:
        ranks: those that may be; none: this rank is alone.
        timeout_seconds: of the collectives.
        who_left: finds out who has left by itself, and why.

    Raises:
        PeerLostError: one is.
    """
    try:
        yield
    except RuntimeError as error:
        if not ranks or not _is_anothers(error):
            raise
        reason = who_left() if who_left else None
        others = f"another of the {ranks_in_words(ranks)}"
        late = f"{others} is gone, or late by more than timeout_seconds={timeout_seconds:g} ({first_line(error)})"
        raise PeerLostError(f"{where} on rank {dist.get_rank()}: {reason or late}; {RESTART}") from error


def is_connection_lost(error: Exception) -> bool:
    """Whether a connection between ranks is gone, rather than slow."""
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in LOST_CONNECTION)


def is_timeout(error: RuntimeError) -> bool:
    """Whether a collective has waited too long, rather than lost a connection."""
    message = str(error).lower()
    return "timed out" in message or "timeout" in message


def _is_anothers(error: RuntimeError) -> bool:
    """Whether an error says that another rank is gone or late; all others are this rank's own."""
    if isinstance(error, RanksDisagreeError | torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    if isinstance(error, dist.DistError | GroupError) or is_connection_lost(error) or is_timeout(error):
        return True
    return any(name in str(error).lower() for name in TRANSPORTS)


def checksum(tensor: torch.Tensor) -> list[int]:
    """Two integer checksums over the bits of a dense tensor, taken where it lives.

    The first is the sum of its 64-bit words, the second weighs every word by its row and by its position in the row, so
    that exchanged words are seen too. No word is widened (a sum that converts is 30 times slower); both wrap modulo
    2^64.
    """
    words = _words(tensor)
    whole = words[: len(words) // CHECKSUM_ROW_WORDS * CHECKSUM_ROW_WORDS].view(-1, CHECKSUM_ROW_WORDS)
    rest = words[whole.numel() :]
    row_sums = torch.cat([whole.sum(1), rest.sum(0, keepdim=True)])
    position_sums = whole.sum(0)
    position_sums[: len(rest)] += rest
    weights = torch.arange(1, max(len(row_sums), CHECKSUM_ROW_WORDS) + 1, device=words.device)
    weighted_rows = (row_sums * weights[: len(row_sums)]).sum()
    weighted_positions = (position_sums * weights[:CHECKSUM_ROW_WORDS]).sum()
    return torch.stack([row_sums.sum(), weighted_rows + weighted_positions * 31]).tolist()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as 64-bit words; a copy only where they are no whole number of those, or not aligned."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -content.numel() % 8
    if missing or content.storage_offset() % 8:
        content = torch.cat([content, content.new_zeros(missing)])
    return content.view(torch.int64)


def configurations_differ(group: Group, facts: Mapping[str, str]) -> str | None:
    """What differs between the ranks' facts, in one line, the same on all of them; None: nothing does. Collective.

    The facts themselves travel only where their digests differ.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
    if len({tuple(row) for row in group.exchange([digest])}) == 1:
        return None
    return first_difference([json.loads(one) for one in group.exchange_text(text)], group.ranks)


def compare_anchors(group: Group, round_number: int, anchor: torch.Tensor) -> None:
    """Make sure that all ranks hold the same anchor after the same round. Collective.

    Raises:
        RanksDisagreeError: they do not.
    """
    rows = group.exchange([round_number, *checksum(anchor)])
    by_round = ranks_by_value((rank, row[0]) for rank, row in zip(group.ranks, rows, strict=True))
    if len(by_round) > 1:
        shown = " and ".join(f"round {number} on {ranks}" for number, ranks in by_round.items())
        raise RanksDisagreeError(f"ranks are in different rounds, {shown}; {RESTART}")
    by_anchor = ranks_by_value((rank, tuple(row)) for rank, row in zip(group.ranks, rows, strict=True))
    if len(by_anchor) > 1:
        shown = " and ".join(by_anchor.values())
        raise RanksDisagreeError(f"after round {round_number}: the anchor differs between {shown}; {RESTART}")


def compare_tensors(part: str, saved: Mapping[str, torch.Tensor], present: Mapping[str, torch.Tensor]) -> None:
    """Make sure that tensors of a state_dict are those that are to be loaded, by name, shape and type.

    Raises:
        ValueError: they are not; one line that names the first.
    """
    for name in {**present, **saved}:
        was, is_here = (
            "missing" if name not in tensors else shape_in_words(tensors[name]) for tensors in (saved, present)
        )
        if was != is_here:
            rule = "load the state of the same model and outer optimizer, and on each rank its own"
            raise ValueError(f"state_dict: its {part} of {name} is {was}, but {is_here} here; {rule}")
