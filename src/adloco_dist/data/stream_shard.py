"""A trainer's streams, and which of their sequences each of its workers reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from adloco_dist.config import Shards
from adloco_dist.data.streams import Claim, Place, Stream


class StreamShard:
    """The streams of one trainer; every rank knows where each of them stood at the beginning of the round.

    Worker m of M reads stream m. With more streams than workers (some were retired) it reads m, m + M, ... in turn;
    with more workers than streams, those that share one take its sequences in turn. All of it follows from the plan,
    never from who hosts a worker.
    """

    size = None
    """Sequences of an epoch: unknown."""

    def __init__(self, trainer: int, streams: Sequence[Stream]) -> None:
        self._trainer, self._streams = trainer, list(streams)

    @property
    def cursor(self) -> int:
        """Sequences taken so far, by those that its streams came from included."""
        return sum(stream.ordinal for stream in self._streams)

    def ids(self, worker: int, num_workers: int, update: int, local_batch: int) -> list[Claim]:
        """What a worker takes in an update of the present round."""
        first = update * local_batch
        return [self._claim(worker, num_workers, first + place) for place in range(local_batch)]

    def ends(self, workers: Sequence[int], num_workers: int, sequences: int) -> Iterator[Claim]:
        """Where streams stand at the end of a round, for those that one of `workers` reads.

        Args:
            workers: hosted here.
            sequences: that every worker takes in the round.
        """
        for stream, end in zip(self._streams, self._ends(num_workers, sequences), strict=True):
            reader = self._streams.index(stream) % num_workers  # of several that share it, the first
            if reader in workers:
                yield Claim(stream, end)

    def advance(self, updates: int, num_workers: int, local_batch: int, places: Mapping[int, Sequence[int]]) -> None:
        """End a round.

        Args:
            places: of all streams of the pool, as the ranks that read them found them.
        """
        ends = self._ends(num_workers, updates * local_batch)
        self._streams = [
            replace(stream, ordinal=end, place=Place(*places[stream.id]))
            for stream, end in zip(self._streams, ends, strict=True)
        ]

    def united(self, members: Sequence["StreamShard"]) -> "StreamShard":
        """This trainer's shard after it has taken in all `members`, itself among them.

        Its own streams come first, so that workers who join with theirs go on reading them.
        """
        others = [member for member in members if member is not self]
        return StreamShard(self._trainer, [stream for member in (self, *others) for stream in member._streams])

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"trainer": self._trainer, "streams": [asdict(stream) for stream in self._streams]}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "StreamShard":
        """The shard that `state` was taken of."""
        streams = [Stream(**{**stream, "place": Place(**stream["place"])}) for stream in state["streams"]]
        return StreamShard(state["trainer"], streams)

    def _claim(self, worker: int, num_workers: int, sequence: int) -> Claim:
        """The `sequence`-th that a worker takes in the present round."""
        num_streams = len(self._streams)
        if num_workers <= num_streams:
            own = range(worker, num_streams, num_workers)
            stream = self._streams[own[sequence % len(own)]]
            return Claim(stream, stream.ordinal + sequence // len(own))
        place = worker % num_streams
        sharers = len(range(place, num_workers, num_streams))
        stream, sharer = self._streams[place], worker // num_streams
        return Claim(stream, stream.ordinal + sequence * sharers + sharer, sharer)

    def _ends(self, num_workers: int, sequences: int) -> Iterator[int]:
        num_streams = len(self._streams)
        for place, stream in enumerate(self._streams):
            if num_workers <= num_streams:
                own = range(place % num_workers, num_streams, num_workers)
                taken = len(range(own.index(place), sequences, len(own)))
            else:
                taken = sequences * len(range(place, num_workers, num_streams))
            yield stream.ordinal + taken


def deal_streams(num_trainers: int, workers_per_trainer: int, policy: Shards) -> list[StreamShard]:
    """Every trainer's streams, one for each worker.

    disjoint: all parts of the corpus. shared: every trainer reads all of it, its files in an order of their own.
    """
    parts = workers_per_trainer * (1 if policy is Shards.shared else num_trainers)
    ids = [range(trainer * workers_per_trainer, (trainer + 1) * workers_per_trainer) for trainer in range(num_trainers)]
    return [
        StreamShard(trainer, [Stream(id, id % parts, parts) for id in ids[trainer]]) for trainer in range(num_trainers)
    ]
