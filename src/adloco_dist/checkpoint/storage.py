"""Which ranks see the same run directory, and files sent between those that do not."""

import http.client
import http.server
import logging
import re
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from adloco_dist.checkpoint.files import prune
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import CheckpointSettings
from adloco_dist.run.manifest import MANIFEST_FILE, Part, digest_of

log = logging.getLogger(__name__)
TOKEN_HEADER = "X-Adloco-Token"
SERVED = re.compile(r"/\d{6,}-round-\d+/[\w.-]+")
"""Paths below the folder that is served: a checkpoint, and a file of it."""
TIMEOUT_SECONDS = 60.0
GREETING_SECONDS = 10.0
"""How long a connection may be silent that has not shown the token."""
CONNECTIONS_PER_RANK = 2
"""Of a server at one time: a rank opens one after the other, of which the last may not have been closed here yet."""
COPY_BYTES = 1 << 20
SO_MAX_PACING_RATE, UNPACED = 47, 0xFFFF_FFFF
"""Linux' option of a socket (bytes per second), which Python does not name, and its value for none."""


@dataclass(frozen=True)
class StorageDomains:
    """The volumes that a folder's path means on a run's ranks, and which ranks share each.

    If there are several, the lowest rank of each serves it to the others: plain HTTP between the nodes' interfaces, for
    those who know the token of this start of the run.
    """

    rank: int
    folder: Path
    of_rank: tuple[int, ...]
    """The volume of every rank, by its lowest rank."""
    addresses: dict[int, tuple[str, int]]
    """Host and port that serve each volume; empty if there is only one."""
    token: str

    @property
    def volume(self) -> int:
        """The volume of this rank."""
        return self.of_rank[self.rank]

    @property
    def volumes(self) -> list[int]:
        """All volumes, ascending."""
        return sorted(set(self.of_rank))

    @property
    def buddy(self) -> int | None:
        """The volume that keeps copies of this one's files; None if there is no other."""
        volumes = self.volumes
        return volumes[(volumes.index(self.volume) + 1) % len(volumes)] if len(volumes) > 1 else None

    def fetch(self, domain: int, path: str, file: Path) -> Part:
        """Copy a file of another volume to `file`; return size and digest of what has come, which may be less.

        Raises:
            OSError: it is not there, cannot be read, or cannot be written here.
        """
        with self._request(domain, "GET", path) as response, file.open("wb") as copy:
            shutil.copyfileobj(response, copy, COPY_BYTES)
        return digest_of(file)

    def send(
        self,
        domain: int,
        path: str,
        file: Path,
        bytes_per_second: float | None = None,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Copy a file to another volume, whole or not at all; raises an OSError where it cannot be written or reached.

        Args:
            bytes_per_second: how fast it may travel; None: as fast as it can, as it does from when it `is_urgent` on.
        """

        def paced(connection: socket.socket) -> BinaryIO:
            return cast(BinaryIO, _PacedFile(body, connection, bytes_per_second, is_urgent))

        with file.open("rb") as body, self._request(domain, "PUT", path, paced, file.stat().st_size):
            pass

    @contextmanager
    def _request(
        self,
        domain: int,
        method: str,
        path: str,
        body: Callable[[socket.socket], BinaryIO] | None = None,
        num_bytes: int = 0,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, readable while the block runs; the body is sent over the socket that it is given."""
        host, port = self.addresses[domain]
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
        try:
            connection.connect()
            content = body and body(connection.sock)
            headers = {TOKEN_HEADER: self.token, "Content-Length": str(num_bytes)}
            connection.request(method, f"/{path}", content, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise OSError(f"{path} on the node at {host}: {response.reason}")
            yield response
        except http.client.HTTPException as error:
            raise OSError(f"{path} on the node at {host}: {error!r}") from error
        finally:
            connection.close()


class _PacedFile:
    """A file whose bytes leave a socket no faster than they may: the kernel paces them, so that what else is sent finds
    the link free."""

    def __init__(
        self, file: BinaryIO, connection: socket.socket, bytes_per_second: float | None, is_urgent: Callable[[], bool]
    ) -> None:
        self._file, self._connection, self._is_urgent = file, connection, is_urgent
        self._is_paced = bytes_per_second is not None
        if bytes_per_second is not None:
            self._pace(max(1, min(int(bytes_per_second), UNPACED)))

    def read(self, num_bytes: int = -1) -> bytes:
        if self._is_paced and self._is_urgent():
            self._pace(UNPACED)
            self._is_paced = False
        return self._file.read(num_bytes)

    def _pace(self, bytes_per_second: int) -> None:
        # As bytes, since the option has no sign.
        self._connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", bytes_per_second))


@contextmanager
def domains_of(runtime: Runtime, folder: Path, settings: CheckpointSettings) -> Iterator[StorageDomains]:
    """Find out which ranks share `folder`, which is made if it is missing, and serve it while the block runs unless all
    do. Collective. When a manifest comes from another volume, older checkpoints are pruned here as well."""

    def received(path: str) -> None:
        if path.endswith(MANIFEST_FILE):
            prune(folder, settings)

    control = runtime.control
    token = control.broadcast({"token": secrets.token_hex(16)} if runtime.rank == 0 else None)["token"]
    of_rank = _find_out(runtime, folder, token)
    heads = sorted(set(of_rank))
    server = address = None
    if len(heads) > 1 and runtime.rank in heads:
        host = runtime.interface.address if runtime.interface else "127.0.0.1"
        server = _Server(folder, token, received, host, CONNECTIONS_PER_RANK * runtime.world_size)
        threading.Thread(target=server.serve_forever, name="files", daemon=True).start()
        address = server.server_address[:2]
    replies = enumerate(control.exchange({"address": address}))
    addresses = {rank: tuple(reply["address"]) for rank, reply in replies if reply["address"]}
    try:
        yield StorageDomains(runtime.rank, folder, of_rank, addresses, token)
    finally:
        if server:
            server.shutdown()
            server.server_close()


def _find_out(runtime: Runtime, folder: Path, token: str) -> tuple[int, ...]:
    """The first rank of every node leaves a file; whoever sees it is on the same volume."""
    control, nodes = runtime.control, runtime.nodes
    first = [nodes.index(node) for node in nodes]
    marks = {head: folder / f".volume-{token}-{head}" for head in set(first)}
    if runtime.rank in marks:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            marks[runtime.rank].touch()
        except OSError as error:  # reported when something is to be written
            log.warning("%s", error)
    control.exchange({})
    seen = min((head for head, mark in marks.items() if mark.exists()), default=first[runtime.rank])
    of_rank = tuple(reply["seen"] for reply in control.exchange({"seen": seen}))
    if runtime.rank in marks:
        with suppress(OSError):  # it could not be made
            marks[runtime.rank].unlink()
    return of_rank


class _Server(http.server.ThreadingHTTPServer):
    """A thread for each connection, in a process that trains: connections beyond a number are closed at once."""

    daemon_threads = True

    def __init__(
        self, folder: Path, token: str, received: Callable[[str], None], host: str, max_connections: int
    ) -> None:
        self.folder, self.token, self.received = folder, token, received
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(max_connections)
        super().__init__((host, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request from %s has failed", client_address, exc_info=True)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Handler(http.server.BaseHTTPRequestHandler):
    """GET and PUT of the files of checkpoints."""

    protocol_version = "HTTP/1.1"
    timeout = GREETING_SECONDS

    def do_GET(self) -> None:
        path = self._allowed()
        if path is None:
            return
        try:
            file = path.open("rb")
        except OSError as error:
            self._answer(http.HTTPStatus.NOT_FOUND, error.strerror)
            return
        with file:
            self.send_response(http.HTTPStatus.OK)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, COPY_BYTES)

    def do_PUT(self) -> None:
        path = self._allowed()
        if path is None:
            return
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
        left = int(self.headers["Content-Length"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                while left:
                    chunk = self.rfile.read(min(left, COPY_BYTES))
                    if not chunk:
                        raise OSError(0, "the connection broke")
                    file.write(chunk)
                    left -= len(chunk)
            temporary.replace(path)
            self._server.received(self.path[1:])
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self.close_connection = True
            self._answer(http.HTTPStatus.INSUFFICIENT_STORAGE, error.strerror)
            return
        self._answer(http.HTTPStatus.OK, None)

    @property
    def _server(self) -> _Server:
        return cast(_Server, self.server)

    def _allowed(self) -> Path | None:
        shown = self.headers.get(TOKEN_HEADER, "").encode(errors="replace")  # as text, it would have to be ASCII
        known = secrets.compare_digest(shown, self._server.token.encode())
        if known:
            self.connection.settimeout(TIMEOUT_SECONDS)
        if known and SERVED.fullmatch(self.path):
            return self._server.folder / self.path[1:]
        self.close_connection = True
        self._answer(http.HTTPStatus.FORBIDDEN, None)
        return None

    def _answer(self, status: http.HTTPStatus, reason: str | None) -> None:
        self.send_response(status, reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
