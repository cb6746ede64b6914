"""Contact with the host of the rendezvous: in a call to a host that has vanished, torchrun's agent would wait on."""

import os
import socket
import threading
import time

import psutil
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from adloco_dist.config import EXIT_FAILURE, SettingsError, require
from adloco_dist.terminal import tell_error

EVERY_SECONDS = 5.0
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""Links that are cut for less are waited for: a node without its agent would stay away until it is started by hand."""
DEFAULT_PORT = 29400
"""torchrun's, of an endpoint that names none."""


def watch_rendezvous(endpoint: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """End this process when its ranks have ended and the endpoint's host, once reached, no longer answers.

    The store client of torch waits for the answer of a host without power far beyond its timeouts (docs/lab-notes.md).
    A refusal is an answer: the host lives, and has closed the store's connections, which the agent notices by itself.

    Args:
        endpoint: "host:port", of the store that the agents share.

    Raises:
        SettingsError: it is no host and port.
    """
    arguments = (*_address(endpoint), patience_seconds)
    threading.Thread(target=_watch, args=arguments, name="rendezvous-watch", daemon=True).start()


def _address(endpoint: str) -> tuple[str, int]:
    """Host and port of the rendezvous.

    Raises:
        SettingsError: it names none.
    """
    require(bool(endpoint), "--rdzv-endpoint", endpoint, "must be HOST:PORT, of one of the nodes")
    try:
        return parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise SettingsError(f"--rdzv-endpoint={endpoint}: must be HOST:PORT ({error})") from error


def _watch(host: str, port: int, patience_seconds: float) -> None:
    answered_at: float | None = None
    while True:
        if _answers(host, port):
            answered_at = time.monotonic()
        elif answered_at is not None and time.monotonic() - answered_at > patience_seconds and not _has_ranks():
            where = f"the host of the rendezvous at {host}:{port}"
            line = f"ended on {socket.gethostname()}: {where} has not answered for {patience_seconds:.0f} s"
            tell_error(f"{line}; start the job again, where it goes on from its checkpoint")
            os._exit(EXIT_FAILURE)  # the main thread cannot be woken
        time.sleep(EVERY_SECONDS)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _has_ranks() -> bool:
    """Whether a rank of this node still runs; the agent has not buried those that have ended."""
    return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())
