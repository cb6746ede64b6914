"""Streams: nothing twice, nothing left out, the same from any place, whatever workers, batches and merges do."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from adloco_dist.config import Corpus, Damaged, DataSettings, Packing, SettingsError, Shards
from adloco_dist.data import protocols
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.data.encoding import END_OF_TEXT
from adloco_dist.data.row_streams import RowStreams, files_of_part
from adloco_dist.data.streams import StreamCursor, StreamDataset, StreamError
from adloco_dist.data.tokens import TokenBatch
from helpers.corpora import write_shards, write_tokenizer
from helpers.reading import read_round, states_of


def streamed(folder: Path, sizes: tuple[int, ...] = (40, 25, 60), **more: object) -> TextSplits:
    if not folder.exists():
        write_shards(folder, sizes)
        write_shards(folder, [5], "c4-validation", first=10_000)
    data = DataSettings(
        corpus=Corpus.json, train=[str(folder / "c4-train*")], validation=[str(folder / "c4-validation*")],
        streaming=True, sequence_length=24, **more,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return load_corpus(data)


def texts(batch: protocols.Batch) -> list[str]:
    assert isinstance(batch, TokenBatch)
    lengths = batch.lengths.tolist() if batch.lengths is not None else [batch.tokens.shape[1]] * len(batch)
    return [
        bytes(token for token in row[:length] if token != END_OF_TEXT).decode()
        for row, length in zip(batch.tokens.tolist(), lengths, strict=True)
    ]


def numbers(batch: protocols.Batch) -> list[int]:
    """The documents that begin in a batch of documents, one each."""
    return [int(re.match(r"<(\d+)>", text).group(1)) for text in texts(batch)]  # pyright: ignore[reportOptionalMemberAccess]


def streams_of(splits: TextSplits) -> tuple[StreamDataset, RowStreams]:
    train = splits.train
    assert isinstance(train, StreamDataset) and isinstance(train.source, RowStreams)
    return train, train.source


def deal(splits: TextSplits, num_trainers: int, workers: int, shards: Shards = Shards.disjoint) -> list[StreamCursor]:
    return streams_of(splits)[0].deal(num_trainers, workers, shards, seed=0)


def test_workers_of_all_trainers_read_disjoint_parts_of_the_corpus(tmp_path: Path) -> None:
    splits = streamed(tmp_path / "c4", packing=Packing.document)
    cursors = dict(enumerate(deal(splits, 2, 3)))
    seen: dict[int, set[int]] = {}
    for (trainer, worker), batches in read_round(cursors, {0: 3, 1: 3}, 2, {0: 4, 1: 4}).items():
        seen[trainer * 3 + worker] = {number for batch in batches for number in numbers(batch)}
    assert all(len(documents) == 8 for documents in seen.values())
    assert len(set.union(*seen.values())) == 6 * 8


@pytest.mark.parametrize("sizes", [(125,), (40, 25, 60), (10,) * 9])
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_an_epoch_of_all_streams_is_the_corpus_once(tmp_path: Path, sizes: tuple[int, ...], parts: int) -> None:
    """Whether there are more files than streams or fewer; and the next epoch is the corpus again."""
    splits = streamed(tmp_path / "c4", sizes, packing=Packing.document)
    (cursor,) = deal(splits, 1, parts)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for worker in range(parts):
            for item in streams_of(splits)[1].items(cursor.streams[worker]):
                document = bytes(token for token in item.tokens.tolist() if token != END_OF_TEXT).decode()
                if item.next.epoch == epoch:
                    seen[int(document[1 : document.index(">")])] += 1
                if item.next.epoch > epoch:
                    break
        assert seen == Counter(range(sum(sizes)))


def test_packed_streams_predict_every_token_once(tmp_path: Path) -> None:
    """Sequences of a stream, put together again, are its documents one after the other."""
    splits = streamed(tmp_path / "c4")
    (cursor,) = deal(splits, 1, 1)
    rows = cast(TokenBatch, cursor.batch(0, 0, 120, (1,))).tokens.numpy()
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
    cursors = dict(enumerate(deal(splits, 3, 2)))
    workers = dict.fromkeys(cursors, 2)
    for _ in range(6):
        updates, batches = rng.randint(1, 3), {trainer: rng.randint(1, 9) for trainer in cursors}
        states = states_of(cursors)
        expected = read_round(cursors, workers, updates, batches)
        fresh = streamed(tmp_path / "c4", packing=packing)
        again = streams_of(fresh)[0].restore(states, 3, Shards.disjoint, seed=0)
        found = read_round(again, workers, updates, batches)
        for key, taken in expected.items():
            assert [texts(batch) for batch in taken] == [texts(batch) for batch in found[key]]
        assert states_of(cursors) == states_of(again)
        if len(cursors) > 1 and rng.random() < 0.5:
            survivor, ended = rng.sample(list(cursors), 2)
            cursors[survivor] = cursors[survivor].unite([cursors.pop(ended)])
            joined = {"join": workers[survivor] + workers[ended], "retire": workers[survivor], "more": 5}
            workers[survivor] = joined[rng.choice(list(joined))]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 7])
def test_any_number_of_workers_shares_a_trainers_streams(tmp_path: Path, num_workers: int) -> None:
    """As after merges: three streams for one worker to seven, every document of an epoch once."""
    splits = streamed(tmp_path / "c4", (30, 30, 30), packing=Packing.document)
    (cursor,) = deal(splits, 1, 3)
    sequences = {1: 90, 2: 30, 3: 30, 4: 15, 5: 15, 7: 10}[num_workers]
    seen: list[int] = []
    for batches in read_round({0: cursor}, {0: num_workers}, sequences, {0: 1}).values():
        seen += [number for batch in batches for number in numbers(batch)]
    assert len(set(seen)) == len(seen) == num_workers * sequences
    assert cursor.position == len(seen)


@pytest.mark.parametrize("counts", [(3, 1), (7, 2, 7), (1, 5, 2, 5), (4, 1, 1, 2, 3, 4, 1)])
def test_workers_of_unequal_speed_read_each_document_once(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """With a stream each, several, or one of those that others read, too; in two rounds, without a gap."""
    splits = streamed(tmp_path / "c4", (30, 30, 30), packing=Packing.document)
    (cursor,) = deal(splits, 1, 3)
    seen: list[int] = []
    for _ in range(2):
        for worker, batches in read_round({0: cursor}, {0: len(counts)}, 0, {0: 2}, {0: counts}).items():
            assert len(batches) == counts[worker[1]]
            seen += [number for batch in batches for number in numbers(batch)]
    assert len(set(seen)) == len(seen) == 2 * 2 * sum(counts) == cursor.position
    (fresh,) = deal(splits, 1, 3)
    whole = read_round({0: fresh}, {0: 3}, 30, {0: 1})
    for number, stream in enumerate(cursor.streams):
        documents = [document for batch in whole[0, number] for document in numbers(batch)]
        assert set(documents[: stream.ordinal]) <= set(seen), "nothing is left out"


def test_shared_streams_are_the_whole_corpus_for_every_trainer(tmp_path: Path) -> None:
    splits = streamed(tmp_path / "c4", (7,) * 8, packing=Packing.document, shards=Shards.shared)
    cursors = dict(enumerate(deal(splits, 2, 2, Shards.shared)))
    taken = read_round(cursors, {0: 2, 1: 2}, 28, {0: 1, 1: 1})
    orders = [
        [number for worker in range(2) for batch in taken[trainer, worker] for number in numbers(batch)]
        for trainer in range(2)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(56))
    assert orders[0] != orders[1]


def test_parts_of_files() -> None:
    assert files_of_part(("a", "b", "c", "d", "e"), 1, 2) == (("b", "d"), 0, 1)
    assert [files_of_part(("a", "b"), part, 5) for part in range(5)] == [
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
    assert whole.table is not None
    (cursor,) = deal(splits, 1, 1)
    rows = cast(TokenBatch, cursor.batch(0, 0, whole.table.num_sequences, (1,)))
    assert rows.tokens.tolist() == whole.table.batch(np.arange(whole.table.num_sequences)).tokens.tolist()
    assert splits.digest != streamed(tmp_path / "c4").digest, "another tokenizer is another corpus"


def test_a_damaged_shard_is_named_and_skipped_only_if_asked(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    write_shards(folder, (400, 400))
    write_shards(folder, [5], "c4-validation", first=10_000)
    damaged = folder / "c4-train.00001-of-00002.json.gz"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    splits = streamed(folder, packing=Packing.document)
    (cursor,) = deal(splits, 1, 1)
    with pytest.raises(StreamError, match=r"data\.train: .*00001-of-00002\.json\.gz cannot be read after row \d+"):
        cursor.batch(0, 0, 700, (1,))
    splits = streamed(folder, packing=Packing.document, damaged=Damaged.skip)
    (cursor,) = deal(splits, 1, 1)
    cursor.batch(0, 0, 700, (1,))
    (note, *_) = splits.train.take_notes()
    assert f"at byte {len(content) // 2} of {len(content) // 2}" in note
    assert splits.train.take_notes() == []


def test_more_workers_than_documents(tmp_path: Path) -> None:
    splits = streamed(tmp_path / "c4", (3,))
    splits.train.check_size(1, 3, Shards.disjoint)
    splits.train.check_size(3, 3, Shards.shared)
    with pytest.raises(SettingsError, match=r"has 3 documents, one for each of 5 streams"):
        splits.train.check_size(5, 1, Shards.disjoint)
    (cursor,) = deal(splits, 1, 5)
    with pytest.raises(StreamError, match="part 5 of 5 has no document"):
        cursor.batch(4, 0, 1, [1] * 5)
