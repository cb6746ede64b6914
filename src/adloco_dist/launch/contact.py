"""Contact with the host of the rendezvous: in a call to a host that has vanished, torchrun's agent would wait on."""

import os
import socket
import sys
import threading
import time

import psutil
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from adloco_dist.config import EXIT_FAILURE

EVERY_SECONDS = 5.0
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""Links that are cut for less are waited for: a node without its agent would stay away until it is started by hand."""
DEFAULT_PORT = 29400
"""torchrun's, of an endpoint that names none."""


def watch_rendezvous(endpoint: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """End this process when its ranks have ended and the endpoint's host, once reached, no longer answers.

    Nothing is sent over an established connection to a host without power that the kernel would not repeat for a
    quarter of an hour, and torch's store client waits for the answer without a limit. A refusal is an answer: there
    the host lives, and the store's connections were closed, which the agent notices by itself.

    Args:
        endpoint: "host:port", of the store that the agents share.
    """
    threading.Thread(target=_watch, args=[endpoint, patience_seconds], name="rendezvous-watch", daemon=True).start()


def _watch(endpoint: str, patience_seconds: float) -> None:
    address = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    answered_at: float | None = None
    while True:
        if _answers(*address):
            answered_at = time.monotonic()
        elif answered_at is not None and time.monotonic() - answered_at > patience_seconds and not _has_ranks():
            where = f"the host of the rendezvous at {endpoint}"
            line = f"ended on {socket.gethostname()}: {where} has not answered for {patience_seconds:.0f} s"
            print(f"{line}; start the job again, where it goes on from its checkpoint", file=sys.stderr, flush=True)
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
