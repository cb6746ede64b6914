"""Data sets that are read in order: every worker begins with a stream of its own.

Streams do not overlap. A position in a stream is a plain JSON value that its source understands, so that any rank can
continue where another stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any, Protocol, Self

from adloco_dist.config import Shards
from adloco_dist.data.protocols import Batch, States, turns_before


class StreamError(RuntimeError):
    """A stream cannot be read any further."""


@dataclass(frozen=True)
class Stream:
    """A part of the data, and how far it was read."""

    id: int
    part: int
    """Number of the part, of `parts` into which the data is divided."""
    parts: int
    ordinal: int = 0
    """Sequences that were taken from it."""
    position: Any = None
    """Where the next one begins, as its reader reported it; None: at the beginning, or where another rank has read."""


class StreamReader(Protocol):
    """Reads one stream in order."""

    def take(self) -> Any:
        """The next sequence; raises a StreamError where the stream cannot be read any further, or holds none."""
        ...

    def position(self) -> Any:
        """Where the next sequence begins, as a plain JSON value; what was read ahead does not count."""
        ...

    def close(self) -> None: ...


class StreamSource(Protocol):
    """Where sequences come from."""

    def check_parts(self, parts: int) -> None:
        """Check that each of so many parts holds a sequence; raises a SettingsError where one does not."""
        ...

    def open(self, stream: Stream) -> StreamReader:
        """A reader that begins at the stream's position."""
        ...

    def collate(self, items: Sequence[Any]) -> Batch:
        """A batch of sequences that readers gave, on the CPU."""
        ...

    def take_notes(self) -> list[str]:
        """See `Dataset.take_notes`."""
        ...


@dataclass
class OpenStream:
    """A stream that this rank reads."""

    reader: StreamReader
    ordinal: int
    """Ordinal of the sequence that the reader gives next."""

    def take(self) -> Any:
        self.ordinal += 1
        return self.reader.take()


@dataclass(frozen=True)
class StreamDataset:
    """A source's streams, and the readers that are open on this rank."""

    source: StreamSource
    digest: str = ""
    num_sequences: None = None
    _open: dict[tuple[int, int], OpenStream] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def check_size(self, num_trainers: int, workers_per_trainer: int, shards: Shards) -> None:
        self.source.check_parts(_num_parts(num_trainers, workers_per_trainer, shards))

    def deal(self, num_trainers: int, workers_per_trainer: int, shards: Shards, seed: int) -> list["StreamCursor"]:
        """Every trainer's streams, one for each worker. disjoint: all parts of the data. shared: every trainer reads
        all of it, in streams with ids of their own. The source decides the order of its sequences, not `seed`."""
        parts = _num_parts(num_trainers, workers_per_trainer, shards)
        streams = [Stream(number, number % parts, parts) for number in range(num_trainers * workers_per_trainer)]
        return [
            StreamCursor(self, trainer, tuple(streams[trainer * workers_per_trainer :][:workers_per_trainer]))
            for trainer in range(num_trainers)
        ]

    def restore(self, states: States, num_trainers: int, shards: Shards, seed: int) -> dict[int, "StreamCursor"]:
        return {
            trainer: StreamCursor(self, state["trainer"], tuple(Stream(**stream) for stream in state["streams"]))
            for trainer, state in states.items()
        }

    def take_notes(self) -> list[str]:
        return self.source.take_notes()

    def opened(self, stream: Stream, ordinal: int, reader_index: int = 0) -> OpenStream:
        """A stream whose next sequence has this ordinal; those before it were read already, or are skipped. Workers
        that share a stream have readers of their own, by index."""
        key = (stream.id, reader_index)
        with self._lock:  # workers of one rank may read at the same time
            known = self._open.get(key)
            if known is None or ordinal < known.ordinal:  # again from the beginning of the round
                assert stream.position is not None or not stream.ordinal, "another rank has read it"
                if known:
                    known.reader.close()
                known = self._open[key] = OpenStream(self.source.open(stream), stream.ordinal)
        while known.ordinal < ordinal:
            known.take()
        return known


@dataclass
class StreamCursor:
    """The streams of one trainer; a rank knows the positions of those that it reads, of others where it has learned
    them.

    Worker m of M reads stream m. With more streams than workers (some were retired) it reads m, m + M, ... in turn;
    with more workers than streams, those that share one take its sequences in turn. None of this depends on the rank
    that runs a worker.
    """

    dataset: StreamDataset
    trainer: int
    streams: tuple[Stream, ...]
    size: None = None

    @property
    def position(self) -> int:
        """Sequences taken so far, including those that other trainers took from its streams before a merge."""
        return sum(stream.ordinal for stream in self.streams)

    def batch(self, worker: int, update: int, local_batch: int, updates: Sequence[int]) -> Batch:
        taken = range(update * local_batch, (update + 1) * local_batch)
        sequences = [count * local_batch for count in updates]
        return self.dataset.source.collate([self._take(worker, number, sequences) for number in taken])

    def ends(self, workers: Sequence[int], local_batch: int, updates: Sequence[int]) -> dict[int, Any]:
        """The positions of the streams that one of `workers` reads at the end of a round."""
        positions = {}
        for number, (stream, end) in enumerate(zip(self.streams, self._ends(local_batch, updates), strict=True)):
            if number % len(updates) in workers:  # the first of those that share it
                positions[stream.id] = self.dataset.opened(stream, end).reader.position()
        return positions

    def advance(self, local_batch: int, updates: Sequence[int], ends: Mapping[int, Any]) -> None:
        self.streams = tuple(
            replace(stream, ordinal=ordinal, position=ends.get(stream.id))
            for stream, ordinal in zip(self.streams, self._ends(local_batch, updates), strict=True)
        )

    def needs_all(self, num_workers: int) -> bool:
        return num_workers > len(self.streams)

    def positions(self) -> dict[int, Any]:
        return {stream.id: stream.position for stream in self.streams if stream.position is not None}

    def learn(self, positions: Mapping[int, Any]) -> None:
        self.streams = tuple(
            replace(stream, position=positions.get(stream.id, stream.position)) for stream in self.streams
        )

    def unite(self, others: Sequence[Self]) -> "StreamCursor":
        """Its own streams come first, so that workers that join continue to read theirs."""
        streams = [*self.streams, *(stream for other in others for stream in other.streams)]
        return StreamCursor(self.dataset, self.trainer, tuple(streams))

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": self.trainer, "streams": [asdict(stream) for stream in self.streams]}

    def _take(self, worker: int, number: int, sequences: Sequence[int]) -> Any:
        """Read the `number`-th sequence that a worker takes in the present round, in which each takes so many
        `sequences`; waits until it is ready."""
        read = self._read_by(worker, len(sequences))
        chosen, reader = read[number % len(read)], worker // len(self.streams)
        stream = self.streams[chosen]
        ordinal = stream.ordinal + turns_before(self._turns(chosen, sequences), reader, number // len(read))
        return self.dataset.opened(stream, ordinal, reader).take()

    def _ends(self, local_batch: int, updates: Sequence[int]) -> list[int]:
        """The ordinal of every stream after a round."""
        sequences = [count * local_batch for count in updates]
        return [stream.ordinal + sum(self._turns(number, sequences)) for number, stream in enumerate(self.streams)]

    def _turns(self, number: int, sequences: Sequence[int]) -> list[int]:
        """How many sequences each of a stream's readers takes from it in a round."""
        read = self._read_by(number % len(sequences), len(sequences))
        readers = range(number % len(sequences), len(sequences), len(self.streams))
        return [len(range(read.index(number), sequences[worker], len(read))) for worker in readers]

    def _read_by(self, worker: int, num_workers: int) -> range:
        """The numbers of the streams that a worker reads in turn."""
        return range(worker % len(self.streams), len(self.streams), num_workers)


def _num_parts(num_trainers: int, workers_per_trainer: int, shards: Shards) -> int:
    return workers_per_trainer * (1 if shards is Shards.shared else num_trainers)
