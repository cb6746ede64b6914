"""What a rank does when it has lost another: it ends, or breaks off what it waits for, and goes on without that one."""

import logging
import os
import socket
from collections.abc import Collection
from contextlib import suppress

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from adloco_dist.cluster.failures import PeerFailedError
from adloco_dist.config import EXIT_FAILURE

log = logging.getLogger(__name__)


class Contact:
    """With the ranks of a world that is lost with the first of them."""

    def lose(self, line: str, place: str) -> None:
        """End this process, whatever its main thread waits for; torchrun's error file has the line.

        Args:
            line: who is lost, and why.
            place: where this rank stood.
        """
        error = PeerFailedError(line)
        log.error("%s (stood in %s)", error, place)
        get_error_handler().record_exception(error)
        logging.shutdown()
        os._exit(EXIT_FAILURE)

    def check(self) -> None:
        """Raise a PeerFailedError once a rank is lost."""


FIXED = Contact()


class BreakableContact(Contact):
    """With the ranks of a world whose others go on without one that is lost.

    Attributes:
        lost: who is lost, and why; None: nobody is.
    """

    lost: str | None = None

    def __init__(self, hosts: Collection[str], kept_ports: Collection[int]) -> None:
        """
        Args:
            hosts: addresses of the nodes.
            kept_ports: of this or another process, whose connections stay.
        """
        self._hosts, self._kept_ports = frozenset(hosts), frozenset(kept_ports)

    def lose(self, line: str, place: str) -> None:
        """Close this process' connections with the nodes: whatever thread waits for them has an error at once, also
        where a message is half-way (docs/lab-notes.md)."""
        if self.lost is None:
            self.lost = line
            log.info("%s (stood in %s)", line, place)
        close_connections(self._hosts, self._kept_ports)
        for group, (backend, _) in list(distributed_c10d._world.pg_map.items()):
            if backend == dist.Backend.NCCL:  # a kernel waits, too
                group.abort()

    def check(self) -> None:
        if self.lost is not None:
            raise PeerFailedError(self.lost)


def close_connections(hosts: Collection[str], kept_ports: Collection[int]) -> None:
    """Shut down this process' TCP connections with these addresses, whichever library has them, except for those from
    or to some ports."""
    for found in psutil.Process().net_connections("tcp"):
        if not found.raddr or found.fd < 0 or found.raddr.ip.removeprefix("::ffff:") not in hosts:
            continue
        if found.laddr.port in kept_ports or found.raddr.port in kept_ports:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
            if connection.getpeername()[1] == found.raddr.port:  # the descriptor may be another's by now
                connection.shutdown(socket.SHUT_RDWR)
