"""Connections with lost nodes are closed under whoever waits for them, and no others: real sockets."""

import socket
import threading
from queue import SimpleQueue

import pytest

from adloco_dist.cluster.contact import BreakableContact
from adloco_dist.cluster.failures import PeerFailedError


def connected(host: str) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def test_who_waits_for_a_lost_node_has_an_end_at_once() -> None:
    near, far = connected("127.0.0.2")
    kept, kept_far = connected("127.0.0.2")
    other, other_far = connected("127.0.0.3")
    heard: SimpleQueue[bytes] = SimpleQueue()
    waiting = threading.Thread(target=lambda: heard.put(near.recv(1)))
    waiting.start()
    contact = BreakableContact(["127.0.0.2"], [kept_far.getsockname()[1]])
    contact.check()
    contact.lose("node1 is gone", "round 3")
    assert heard.get(timeout=60) == b""
    waiting.join()
    with pytest.raises(PeerFailedError, match="node1 is gone"):
        contact.check()
    for one, its_far in ((kept, kept_far), (other, other_far)):
        one.sendall(b"x")
        assert its_far.recv(1) == b"x"
    for each in (near, far, kept, kept_far, other, other_far):
        each.close()
