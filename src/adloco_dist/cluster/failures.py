"""How a rank fails: with what it was about, reported once for all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from adloco_dist.averaging.checks import is_connection_lost
from adloco_dist.text import first_line

FIRST_FAILURE = "first_failure"
"""Key in the store: who failed first, in one line."""


class RankFailedError(RuntimeError):
    """This rank failed. Its line says where, in what and why; torchrun's error file and the driver show it."""


class LostContactError(RankFailedError):
    """This rank lost contact with another, which has reported no cause: a signal may have ended it."""


class PeerFailedError(RuntimeError):
    """Another rank failed before this one, which only lost contact; the line names the other."""


@contextmanager
def about(what: str) -> Iterator[None]:
    """Add a note to any error in the block: what it was about ("trainer 1"), outermost last."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def failed(error: Exception, where: str, store: Store) -> RuntimeError:
    """What to raise instead of `error` on a rank ("rank 3 on node1"), so that one of all ranks reports the cause.

    The first to write into the store has failed by itself: its peers lose contact only when its process ends.
    """
    line = ", ".join([where, *reversed(getattr(error, "__notes__", []))])
    line += f": {type(error).__name__}: {first_line(error)}"
    try:
        first = store.compare_set(FIRST_FAILURE, "", line).decode()
    except RuntimeError:  # the store's host is gone
        first = line
    if first != line:
        return PeerFailedError(first)
    return LostContactError(line) if is_connection_lost(error) else RankFailedError(line)
