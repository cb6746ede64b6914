"""Parts of checkpoints between nodes without shared disks, through the real server."""

import http.client
import socket
import threading
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adloco_dist.checkpoint import storage
from adloco_dist.checkpoint.search import CheckpointReader
from adloco_dist.checkpoint.storage import TOKEN_HEADER, StorageDomains
from adloco_dist.run.manifest import DamagedError, Manifest, digest_of

NAME, FILE, TOKEN = "000012-round-60", "trainer-0.safetensors", "0123456789abcdef"


@contextmanager
def served(folder: Path, received: list[str], max_connections: int = 10) -> Iterator[tuple[str, int]]:
    server = storage._Server(folder, TOKEN, received.append, "127.0.0.1", max_connections)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield "127.0.0.1", server.server_address[1]
    server.shutdown()
    server.server_close()


class Nodes:
    """Two nodes: one has a checkpoint, of which the other reads a part."""

    def __init__(self, folder: Path, address: tuple[str, int], there: Path) -> None:
        self.here, self.there = folder, there
        addresses = {0: ("", 0), 1: address}
        self.domains = StorageDomains(0, self.here, (0, 1), addresses, TOKEN)

    def reader(self, manifest: Manifest, holders: Sequence[int] = (1,)) -> CheckpointReader:
        return CheckpointReader(NAME, self.domains, manifest, {FILE: holders})


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there / NAME):
        folder.mkdir(parents=True)
    save_file({"anchor": torch.arange(3_000_000.0), "momentum": torch.ones(3)}, there / NAME / FILE)
    with served(there, []) as address:
        yield Nodes(here, address, there)


def test_a_part_of_another_node_is_mapped_from_a_file_that_is_gone_then(nodes: Nodes) -> None:
    """Of 12 MB a few pieces are in memory that Python has taken, of the server and of the reader."""
    reader = nodes.reader({FILE: digest_of(nodes.there / NAME / FILE)})
    reader.read(FILE)  # imports
    tracemalloc.start()
    found = reader.read(FILE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * storage.COPY_BYTES
    regions = mapped_regions()
    place = found["anchor"].data_ptr()
    (line,) = [line for start, end, line in regions if start <= place < end]
    assert FILE in line and "(deleted)" in line
    assert torch.equal(found["anchor"], torch.arange(3_000_000.0))
    assert torch.equal(found["momentum"], torch.ones(3))
    assert not list(nodes.here.iterdir()), "nothing is left"


def mapped_regions() -> list[tuple[int, int, str]]:
    """Start, end and line of every region of this process's memory."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        regions.append((int(start, 16), int(end, 16), line))
    return regions


def test_content_of_another_node_is_what_was_written(nodes: Nodes) -> None:
    reader = nodes.reader({FILE: digest_of(nodes.there / NAME / FILE)})
    assert reader.content(FILE) == (nodes.there / NAME / FILE).read_bytes()
    assert not list(nodes.here.iterdir())


@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty", "longer"])
def test_a_part_that_is_damaged_there_is_refused_and_leaves_nothing(nodes: Nodes, damage: str) -> None:
    path = nodes.there / NAME / FILE
    reader, content = nodes.reader({FILE: digest_of(path)}), bytearray(path.read_bytes())
    if damage == "one bit":
        content[1000] ^= 1
    path.write_bytes({"cut off": content[:-9], "one bit": content, "empty": b"", "longer": content + b"x"}[damage])
    with pytest.raises(DamagedError, match=rf"^{FILE}: (has \d+ bytes instead of|does not fit its digest)"):
        reader.read(FILE)
    assert not list(nodes.here.iterdir())


def test_a_connection_that_breaks_halfway_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """As of a node that is lost meanwhile: it promises more than it sends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(10_000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    path = tmp_path / FILE
    path.write_bytes(b"x" * 1_000_000)
    part = digest_of(path)
    path.unlink()
    with listener, pytest.raises((DamagedError, OSError)) as raised:
        Nodes(tmp_path, listener.getsockname(), tmp_path).reader({FILE: part}).read(FILE)
    assert "1000 bytes instead of 1000000" in str(raised.value) or "IncompleteRead" in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_part_that_is_nowhere_and_a_node_that_is_gone_are_named(nodes: Nodes) -> None:
    part = digest_of(nodes.there / NAME / FILE)
    (nodes.there / NAME / FILE).unlink()
    with pytest.raises(OSError, match=rf"{NAME}/{FILE} on the node at 127.0.0.1: No such file"):
        nodes.reader({FILE: part}).read(FILE)
    with pytest.raises(DamagedError, match="is not in its manifest"):
        nodes.reader({FILE: part}).read("trainer-1.safetensors")
    assert not list(nodes.here.iterdir())


def test_a_copy_arrives_whole_and_is_noted(tmp_path: Path) -> None:
    received: list[str] = []
    source = tmp_path / "source"
    source.write_bytes(b"abc" * 1_000_000)
    with served(tmp_path / "there", received) as address:
        Nodes(tmp_path, address, tmp_path / "there").domains.send(1, f"{NAME}/{FILE}", source)
    assert received == [f"{NAME}/{FILE}"]
    assert (tmp_path / "there" / NAME / FILE).read_bytes() == source.read_bytes()


def test_a_copy_travels_slowly_until_it_is_awaited(tmp_path: Path) -> None:
    """It would take hours."""
    source, is_awaited, received = tmp_path / "source", threading.Event(), list[str]()
    source.write_bytes(b"abc" * 1_000_000)
    with served(tmp_path / "there", received) as address:
        domains = Nodes(tmp_path, address, tmp_path / "there").domains
        looks = iter([False, False])

        def is_urgent() -> bool:
            if not next(looks, True):
                return False
            is_awaited.wait()
            return True

        path = f"{NAME}/{FILE}"
        sending = threading.Thread(target=domains.send, args=(1, path, source, 100.0, is_urgent), daemon=True)
        sending.start()
        assert not received
        is_awaited.set()
        sending.join()
    assert received == [path]
    assert (tmp_path / "there" / NAME / FILE).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], "schlüssel".encode("latin-1"), "\x7f" * 40])
def test_who_does_not_know_the_token_is_turned_away(nodes: Nodes, token: str | bytes) -> None:
    connection = http.client.HTTPConnection(*nodes.domains.addresses[1], timeout=10)
    connection.request("GET", f"/{NAME}/{FILE}", headers={TOKEN_HEADER: token})
    response = connection.getresponse()
    assert (response.status, response.read()) == (403, b"")
    connection.close()


def test_a_server_has_no_more_threads_than_it_allows(nodes: Nodes) -> None:
    """Connections beyond are closed at once; when one of the others ends, there is room again."""
    with served(nodes.there, [], max_connections=3) as address:
        reader = Nodes(nodes.here, address, nodes.there).reader({FILE: digest_of(nodes.there / NAME / FILE)})
        idle = [socket.create_connection(address) for _ in range(3)]
        with socket.create_connection(address) as further:
            assert further.recv(1) == b"", "closed"
        with pytest.raises(OSError):
            reader.read(FILE)
        for connection in idle:
            connection.close()
        assert len(read_when_there_is_room(reader)) == 2


def read_when_there_is_room(reader: CheckpointReader) -> Mapping[str, torch.Tensor]:
    """What the server answers as soon as it does: it hears of closed connections in its own time."""
    while True:
        try:
            return reader.read(FILE)
        except OSError:
            continue
