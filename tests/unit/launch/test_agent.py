"""Whether ranks that were asked to stop could start again, with torch's own rendezvous."""

import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from adloco_dist.launch.agent import _RendezvousUntilStopped, _StoppedError, _Stopping


def test_once_asked_to_stop_no_node_is_waited_for_and_nothing_starts_again() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    backend = C10dRendezvousBackend(store, "job")
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{store.port}", "job", 1, 2, "127.0.0.1", last_call_timeout=1)
    first, second = (create_handler(store, backend, parameters) for _ in range(2))
    stopping = _Stopping(can_stop=True)
    rendezvous = _RendezvousUntilStopped(first, stopping)
    assert rendezvous.next_rendezvous().world_size == 1

    def wait_for_the_next() -> None:
        with suppress(RendezvousClosedError):
            second.next_rendezvous()

    waiting = threading.Thread(target=wait_for_the_next)
    waiting.start()
    while rendezvous.num_nodes_waiting() == 0:
        pass
    stopping.is_requested = True
    assert first.num_nodes_waiting() == 1
    assert rendezvous.num_nodes_waiting() == 0
    with pytest.raises(_StoppedError):
        rendezvous.next_rendezvous()
    rendezvous.set_closed()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert rendezvous.shutdown() and second.shutdown(), "their timers end"
