"""Messages that travel while updates are computed: reports to rank 0 and plans from it, through the store."""

from torch.distributed.distributed_c10d import Store

from adloco_dist.cluster.control import Message, packed, unpacked
from adloco_dist.cluster.heartbeat import patient_client


class Mail:
    """Gathers messages to rank 0 and broadcasts others from it, as the control plane does, but for one thread of each
    rank beside the main one: every rank's thread makes the same calls.

    A message takes the time of one trip: it is written into the store, which lies with rank 0, and a rank that waits
    for one asks before it is there.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = patient_client(store)
        self._rank, self._others = rank, range(1, world_size)
        self._gathered = self._sent = 0
        self.bytes_sent = 0
        """Payload bytes that this rank has sent to others so far."""

    def gather(self, message: Message) -> list[Message]:
        """Every rank's message by rank on rank 0, once all are there; an empty list on the others, which wait for
        nothing."""
        number, self._gathered = self._gathered, self._gathered + 1
        content = packed(message)
        if self._rank:
            self._set(f"report/{number}/{self._rank}", content)
            self.bytes_sent += len(content)
            return []
        keys = [f"report/{number}/{rank}" for rank in self._others]
        contents = self._store.multi_get(keys) if keys else []
        for key in keys:
            self._store.delete_key(key)
        return [unpacked(one) for one in (content, *contents)]  # its own, too, as the others' have come

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message on every rank; the others pass None, and wait for it."""
        number, self._sent = self._sent, self._sent + 1
        if message is None:
            return unpacked(self._store.get(f"plan/{number}"))
        content = packed(message)
        if self._others:
            self._set(f"plan/{number}", content)
            self.bytes_sent += len(content) * len(self._others)
            if number > 1:  # all ranks have read it: they have reported the round of the next one
                self._store.delete_key(f"plan/{number - 2}")
        return unpacked(content)

    def _set(self, key: str, content: bytes) -> None:
        self._store.set(key, content)  # pyright: ignore[reportArgumentType]  (the stub knows text alone)
