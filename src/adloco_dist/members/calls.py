"""Short questions to other processes, and their answers in time: a line of JSON each, over connections of their own."""

import errno
import json
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
MAX_BYTES = 1 << 26
"""Facts of a model of a million tensors."""


class Server:
    """Answers calls in threads, until it is closed.

    Attributes:
        address: HOST:PORT.
    """

    def __init__(self, host: str, port: int, answer: Callable[[Message], Message]) -> None:
        """`port` 0: a free one. An OSError says that it cannot be had."""

        class Handler(socketserver.StreamRequestHandler):
            timeout = 10.0

            def handle(self) -> None:
                line = self.rfile.readline(MAX_BYTES)
                if _has_gone(self.connection):  # it has waited for too long, as this process stood still
                    return
                try:
                    reply = answer(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    return  # no message of ours
                self.wfile.write(json.dumps(reply).encode() + b"\n")

        class Threads(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A caller that is gone is no error of ours."""

        self._server = Threads((host, port), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="calls", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def serve(addresses: Sequence[str], answer: Callable[[Message], Message]) -> tuple[Server, str]:
    """A server at the first of these addresses where that can be, and which of those before another process has, in
    words; a ValueError of one line says that it can be at none."""
    reasons, taken = [], ""
    for address in addresses:
        try:
            return Server(*split(address), answer), taken
        except OSError as error:  # in use, or an address of another machine
            reasons.append(f"{address} ({error.strerror or error})")
            if error.errno == errno.EADDRINUSE:
                taken += f"; another process has {address} here"
    raise ValueError(f"listen: this process cannot listen at {', '.join(reasons)}")


def _has_gone(connection: socket.socket) -> bool:
    """Whether the other side, which has sent all that it sends, has closed the connection."""
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable)


def call(address: str, message: Message, seconds: float) -> Message:
    """Ask, and wait for the answer.

    Raises:
        OSError: nobody is there (ConnectionError), or no answer has come in that time (TimeoutError).
    """
    with socket.create_connection(split(address), timeout=seconds) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")
        with connection.makefile("rb") as stream:
            line = stream.readline(MAX_BYTES)
    if not line.endswith(b"\n"):
        raise ConnectionResetError(f"{address} has closed the connection")
    return json.loads(line)


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; a ValueError of one line says that it is none."""
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 1 << 16:
        raise ValueError(f"{address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def address_towards(host: str) -> str | None:
    """The address of this machine from which packets to another one leave; none are sent. None: there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return None
