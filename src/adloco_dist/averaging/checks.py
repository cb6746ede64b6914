"""What shows that ranks have drifted apart, and the errors that end a run."""

import torch
import torch.distributed as dist

from adloco_dist.averaging.group import Group, GroupError
from adloco_dist.text import ranks_by_value

CHECKSUM_ROW_WORDS = 64
MARK_ELEMENTS = 8
"""Elements of a payload by which ranks find that their anchors differ: a byte each, whose sum over 65,536 ranks is
exact in fp32."""
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
GO_ON = "regroup those that are left, or restart all and load the last state_dict"


class RanksDisagreeError(RuntimeError):
    """Ranks that must hold the same anchor hold different ones: training must stop. Its line names them."""


class PeerLostError(RuntimeError):
    """Another rank is gone, or did not come in time. Its line says when, among which ranks, and what to do."""


def is_connection_lost(error: Exception) -> bool:
    """Whether a connection between ranks is gone, rather than slow."""
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in LOST_CONNECTION)


def is_timeout(error: RuntimeError) -> bool:
    """Whether a collective has waited too long, rather than lost a connection."""
    message = str(error).lower()
    return "timed out" in message or "timeout" in message


def is_of_another(error: RuntimeError) -> bool:
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


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a dense tensor's 64-bit words, modulo 2^64: a scalar, int64, on its device."""
    return _words(tensor).sum()


def mark_of(word_sums: list[int], round_number: int) -> list[int]:
    """The (MARK_ELEMENTS,) bytes that stand for a round and what an anchor was in it, of sums of its parts."""
    number = sum(value * (2 * place + 1) for place, value in enumerate([round_number, *word_sums]))
    return list((number % (1 << 8 * MARK_ELEMENTS)).to_bytes(MARK_ELEMENTS, "little"))


def compare_anchors(group: Group, round_number: int, anchor: torch.Tensor) -> None:
    """Raise a RanksDisagreeError unless all ranks hold the same anchor after the same round. Collective."""
    rows = group.exchange([round_number, *checksum(anchor)])
    by_round = ranks_by_value((rank, row[0]) for rank, row in zip(group.ranks, rows, strict=True))
    if len(by_round) > 1:
        shown = " and ".join(f"round {number} on {ranks}" for number, ranks in by_round.items())
        raise RanksDisagreeError(f"ranks are in different rounds, {shown}; {RESTART}")
    by_anchor = ranks_by_value((rank, tuple(row)) for rank, row in zip(group.ranks, rows, strict=True))
    if len(by_anchor) > 1:
        shown = " and ".join(by_anchor.values())
        raise RanksDisagreeError(f"after round {round_number}: the anchor differs between {shown}; {RESTART}")
