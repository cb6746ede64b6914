"""Streams: nothing twice, nothing left out, the same from any place, whatever workers, batches and merges do."""

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from corpora import write_shards, write_tokenizer

from adloco_dist.config import Corpus, Damaged, DataSettings, Packing, SettingsError, Shards
from adloco_dist.data.batch import Batch
from adloco_dist.data.corpora import Splits, load_corpus
from adloco_dist.data.encoding import END_OF_TEXT
from adloco_dist.data.stream_shard import StreamShard
from adloco_dist.data.streams import RowStreams, StreamError, share


def streamed(folder: Path, sizes: tuple[int, ...] = (40, 25, 60), **more: object) -> Splits:
    if not folder.exists():
        write_shards(folder, sizes)
        write_shards(folder, [5], "c4-validation", first=10_000)
    data = DataSettings(
        corpus=Corpus.json, train=[str(folder / "c4-train*")], validation=[str(folder / "c4-validation*")],
        streaming=True, sequence_length=24, **more,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return load_corpus(data)


def texts(batch: Batch) -> list[str]:
    lengths = batch.lengths.tolist() if batch.lengths is not None else [batch.tokens.shape[1]] * len(batch)
    return [
        bytes(token for token in row[:length] if token != END_OF_TEXT).decode()
        for row, length in zip(batch.tokens.tolist(), lengths, strict=True)
    ]


def numbers(batch: Batch) -> list[int]:
    """The documents that begin in a batch of documents, one each."""
    return [int(re.match(r"<(\d+)>", text).group(1)) for text in texts(batch)]  # pyright: ignore[reportOptionalMemberAccess]


def read_round(
    splits: Splits, shards: dict[int, StreamShard], workers: dict[int, int], updates: int, local_batch: dict[int, int]
) -> dict[tuple[int, int], list[Batch]]:
    """What every worker of every trainer takes in a round, after which all shards have moved on."""
    train, taken, places = splits.train, {}, {}
    assert isinstance(train, RowStreams)
    for id, shard in shards.items():
        for worker in range(workers[id]):
            batches = [
                train.batch(shard.ids(worker, workers[id], update, local_batch[id])) for update in range(updates)
            ]
            taken[id, worker] = batches
        for claim in shard.ends(range(workers[id]), workers[id], updates * local_batch[id]):
            place = train.place(claim)
            places[claim.stream.id] = [place.epoch, place.file, place.row, place.token]
    for id, shard in shards.items():
        shard.advance(updates, workers[id], local_batch[id], places)
    return taken


def test_workers_of_all_trainers_read_disjoint_parts_of_the_corpus(tmp_path: Path) -> None:
    splits = streamed(tmp_path / "c4", packing=Packing.document)
    shards = {
        id: shard for id, shard in enumerate(splits.deal(2, 3, DataSettings(), 0)) if isinstance(shard, StreamShard)
    }
    seen: dict[int, set[int]] = {}
    for (id, worker), batches in read_round(splits, shards, {0: 3, 1: 3}, 2, {0: 4, 1: 4}).items():
        seen[id * 3 + worker] = {number for batch in batches for number in numbers(batch)}
    assert all(len(documents) == 8 for documents in seen.values())
    assert len(set.union(*seen.values())) == 6 * 8


@pytest.mark.parametrize("sizes", [(125,), (40, 25, 60), (10,) * 9])
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_an_epoch_of_all_streams_is_the_corpus_once(tmp_path: Path, sizes: tuple[int, ...], parts: int) -> None:
    """Whether there are more files than streams or fewer; and the next epoch is the corpus again."""
    splits = streamed(tmp_path / "c4", sizes, packing=Packing.document)
    assert isinstance(splits.train, RowStreams)
    (shard,) = splits.deal(1, parts, DataSettings(), 0)
    assert isinstance(shard, StreamShard)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for worker in range(parts):
            for item in splits.train.items(shard.ids(worker, parts, 0, 1)[0].stream):
                document = bytes(token for token in item.tokens.tolist() if token != END_OF_TEXT).decode()
                if item.next.epoch == epoch:
                    seen[int(document[1 : document.index(">")])] += 1
                if item.next.epoch > epoch:
                    break
        assert seen == Counter(range(sum(sizes)))


def test_packed_streams_predict_every_token_once(tmp_path: Path) -> None:
    """Sequences of a stream, put together again, are its documents one after the other."""
    splits = streamed(tmp_path / "c4")
    assert isinstance(splits.train, RowStreams)
    (shard,) = splits.deal(1, 1, DataSettings(), 0)
    rows = splits.train.batch(shard.ids(0, 1, 0, 120)).tokens.numpy()  # pyright: ignore[reportArgumentType]
    assert (rows[1:, 0] == rows[:-1, -1]).all(), "neighbours share a token"
    whole = np.concatenate([rows[0], *rows[1:, 1:]])
    documents = bytes(np.where(whole == END_OF_TEXT, 0, whole).astype(np.uint8)).split(b"\0")[:-1]
    written = write_shards(tmp_path / "again", (40, 25, 60))
    assert all(document.decode() in written for document in documents)
    assert len(documents) == len(set(documents)) > 10


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("seed", range(4))
def test_any_rank_goes_on_where_another_stopped(tmp_path: Path, packing: Packing, seed: int) -> None:
    """Rounds with other batches and merges: a reader that starts anew from the shards' state reads the very same."""
    rng = random.Random(seed)
    splits = streamed(tmp_path / "c4", packing=packing)
    shards = {
        id: shard for id, shard in enumerate(splits.deal(3, 2, DataSettings(), 0)) if isinstance(shard, StreamShard)
    }
    workers = dict.fromkeys(shards, 2)
    for _ in range(6):
        updates, batches = rng.randint(1, 3), {id: rng.randint(1, 9) for id in shards}
        states = {id: shard.state() for id, shard in shards.items()}
        expected = read_round(splits, shards, workers, updates, batches)
        fresh = streamed(tmp_path / "c4", packing=packing)
        again = {
            id: shard
            for id, shard in fresh.restored(states, 3, DataSettings(), 0).items()
            if isinstance(shard, StreamShard)
        }
        found = read_round(fresh, again, workers, updates, batches)
        for key, taken in expected.items():
            assert [texts(batch) for batch in taken] == [texts(batch) for batch in found[key]]
        assert {id: shard.state() for id, shard in shards.items()} == {id: shard.state() for id, shard in again.items()}
        if len(shards) > 1 and rng.random() < 0.5:
            survivor, ended = rng.sample(list(shards), 2)
            members = [shards[id] for id in sorted((survivor, ended))]
            shards[survivor] = shards[survivor].united(members)
            del shards[ended]
            joined = {"join": workers[survivor] + workers[ended], "retire": workers[survivor], "more": 5}
            workers[survivor] = joined[rng.choice(list(joined))]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 7])
def test_any_number_of_workers_shares_a_trainers_streams(tmp_path: Path, num_workers: int) -> None:
    """As after merges: three streams for one worker to seven, every document of an epoch once."""
    splits = streamed(tmp_path / "c4", (30, 30, 30), packing=Packing.document)
    (shard,) = splits.deal(1, 3, DataSettings(), 0)
    assert isinstance(shard, StreamShard)
    sequences = {1: 90, 2: 30, 3: 30, 4: 15, 5: 15, 7: 10}[num_workers]
    seen: list[int] = []
    for batches in read_round(splits, {0: shard}, {0: num_workers}, sequences, {0: 1}).values():
        seen += [number for batch in batches for number in numbers(batch)]
    assert len(set(seen)) == len(seen) == num_workers * sequences
    assert shard.cursor == len(seen)


def test_shared_streams_are_the_whole_corpus_for_every_trainer(tmp_path: Path) -> None:
    splits = streamed(tmp_path / "c4", (7,) * 8, packing=Packing.document, shards=Shards.shared)
    data = DataSettings(shards=Shards.shared)
    shards = {id: shard for id, shard in enumerate(splits.deal(2, 2, data, 0)) if isinstance(shard, StreamShard)}
    taken = read_round(splits, shards, {0: 2, 1: 2}, 28, {0: 1, 1: 1})
    orders = [
        [number for worker in range(2) for batch in taken[id, worker] for number in numbers(batch)] for id in range(2)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(56))
    assert orders[0] != orders[1]


def test_parts_of_files() -> None:
    assert share(("a", "b", "c", "d", "e"), 1, 2) == (("b", "d"), 0, 1)
    assert [share(("a", "b"), part, 5) for part in range(5)] == [
        (("a",), 0, 3), (("b",), 0, 2), (("a",), 1, 3), (("b",), 1, 2), (("a",), 2, 3),
    ]  # fmt: skip


def test_a_tokenizer_streams_the_same_as_it_reads(tmp_path: Path) -> None:
    """The sequences of one stream are those of the same files read as a whole."""
    written = write_shards(tmp_path / "c4", (30,))
    write_shards(tmp_path / "c4", [5], "c4-validation", first=10_000)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", written))
    splits = streamed(tmp_path / "c4", tokenizer=tokenizer)
    whole = load_corpus(
        DataSettings(
            corpus=Corpus.json, train=[str(tmp_path / "c4" / "c4-train*")], sequence_length=24, tokenizer=tokenizer,
            validation=[str(tmp_path / "c4" / "c4-validation*")],
        )
    )  # fmt: skip
    assert isinstance(splits.train, RowStreams) and not isinstance(whole.train, RowStreams)
    (shard,) = splits.deal(1, 1, DataSettings(), 0)
    rows = splits.train.batch(shard.ids(0, 1, 0, whole.train.num_sequences))  # pyright: ignore[reportArgumentType]
    assert rows.tokens.tolist() == whole.train.batch(np.arange(whole.train.num_sequences)).tokens.tolist()
    assert splits.digest != streamed(tmp_path / "c4").digest, "another tokenizer is another corpus"


def test_a_damaged_shard_is_named_and_skipped_only_if_asked(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    write_shards(folder, (400, 400))
    write_shards(folder, [5], "c4-validation", first=10_000)
    damaged = folder / "c4-train.00001-of-00002.json.gz"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    splits = streamed(folder, packing=Packing.document)
    (shard,) = splits.deal(1, 1, DataSettings(), 0)
    with pytest.raises(StreamError, match=r"data\.train: .*00001-of-00002\.json\.gz cannot be read after row \d+"):
        splits.train.batch(shard.ids(0, 1, 0, 700))  # pyright: ignore[reportArgumentType]
    splits = streamed(folder, packing=Packing.document, damaged=Damaged.skip)
    assert isinstance(splits.train, RowStreams)
    (shard,) = splits.deal(1, 1, DataSettings(), 0)
    splits.train.batch(shard.ids(0, 1, 0, 700))  # pyright: ignore[reportArgumentType]
    (note, *_) = splits.train.take_notes()
    assert f"at byte {len(content) // 2} of {len(content) // 2}" in note
    assert splits.train.take_notes() == []


def test_more_workers_than_documents(tmp_path: Path) -> None:
    splits = streamed(tmp_path / "c4", (3,))
    assert isinstance(splits.train, RowStreams)
    splits.train.check_parts(3)
    with pytest.raises(SettingsError, match=r"has 3 documents, one for each of 5 streams"):
        splits.train.check_parts(5)
    (shard,) = splits.deal(1, 5, DataSettings(), 0)
    with pytest.raises(StreamError, match="part 5 of 5 has no document"):
        splits.train.batch(shard.ids(4, 5, 0, 1))  # pyright: ignore[reportArgumentType]
