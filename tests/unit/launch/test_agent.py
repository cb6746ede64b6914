"""Whether ranks that were asked to stop could start again, with torch's own rendezvous."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from adloco_dist.launch.agent import _RendezvousUntilStopped, _StoppedError, _Stopping


def test_ranks_that_were_asked_to_stop_do_not_start_again() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    backend = C10dRendezvousBackend(store, "job")
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{store.port}", "job", 1, 1, "127.0.0.1")
    stopping = _Stopping(can_stop=True)
    rendezvous = _RendezvousUntilStopped(create_handler(store, backend, parameters), stopping)
    assert rendezvous.next_rendezvous().world_size == 1
    assert rendezvous.next_rendezvous().world_size == 1, "a restart meets again"
    stopping.is_requested = True
    with pytest.raises(_StoppedError):
        rendezvous.next_rendezvous()
    assert rendezvous.shutdown(), "its timer ends"
