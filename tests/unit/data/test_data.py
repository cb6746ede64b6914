"""Corpora, the byte tokenizer, sequences, and the shards, whose sequences are used once per epoch."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from adloco_dist.config import Corpus, DataSettings, SettingsError, Shards
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.encoding import END_OF_TEXT, Tokens, byte_tokenizer, encode_bytes
from adloco_dist.data.indexed import ShardCursor, permutation
from adloco_dist.data.token_files import MANIFEST_FILE, Manifest, TokenFile
from adloco_dist.data.tokens import TokenTable
from adloco_dist.messages import encode
from helpers.tables import advance, deal, ids_of_shard


def text(*paths: Path, **more: object) -> DataSettings:
    return DataSettings(corpus=Corpus.text, train=[str(path) for path in paths], sequence_length=8, **more)  # pyright: ignore[reportArgumentType]


def ids_of(store: object) -> Tokens:
    """All token ids of a store of one array."""
    assert isinstance(store, TokenTable)
    (ids,) = store.parts
    return ids


def test_the_standard_library_is_real_text_split_by_file() -> None:
    splits = load_corpus(DataSettings())
    train, validation = ids_of(splits.table), ids_of(splits.validation)
    assert len(train) > 5_000_000
    held_out = len(validation) / (len(train) + len(validation))
    assert 0.01 < held_out < 0.15
    assert b"def __init__(self" in bytes(train[train < 256].astype(np.uint8))
    assert splits.digest == load_corpus(DataSettings()).digest


def test_no_document_is_in_both_splits(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index:02}.txt").write_text(f"document number {index} " * 5)
    (tmp_path / "copy.txt").write_text("document number 7 " * 5)
    splits = load_corpus(text(tmp_path / "*.txt", validation_fraction=0.3))
    train, validation = (
        set(bytes(np.where(ids_of(store) == END_OF_TEXT, 0, ids_of(store)).astype(np.uint8)).split(b"\0")) - {b""}
        for store in (splits.table, splits.validation)
    )
    assert train and validation
    assert not train & validation


def test_documents_that_all_have_one_text_leave_nothing_to_train_on(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("the same text " * 50)
    with pytest.raises(SettingsError, match="all 2 documents have one text"):
        load_corpus(text(tmp_path / "*.txt"))


def test_the_digest_tells_corpora_apart_but_not_their_places(tmp_path: Path) -> None:
    for name, content in (
        ("a", "one two three four " * 20),
        ("b", "one two three four " * 20),
        ("c", "one two three " * 20),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(content)
    a, b, c = (load_corpus(text(tmp_path / name / "*")).digest for name in "abc")
    assert a == b != c


def test_a_single_file_is_split_at_its_tail(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(bytes(range(97, 107)) * 20)
    splits = load_corpus(text(tmp_path / "x.txt", validation_fraction=0.1))
    assert (len(ids_of(splits.table)), len(ids_of(splits.validation))) == (181, 20)
    assert ids_of(splits.validation)[-1] == END_OF_TEXT


def test_token_files_are_mapped_not_read(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint32) % 321
    np.save(tmp_path / "train.npy", ids)
    data = DataSettings(corpus=Corpus.tokens, train=[str(tmp_path / "train.npy")], sequence_length=8)
    splits = load_corpus(data)
    assert isinstance(splits.table, TokenTable)
    assert isinstance(splits.table.parts[0], np.memmap)
    assert splits.vocabulary.size == 321
    np.testing.assert_array_equal(splits.table.batch(np.array([3])).tokens[0].numpy(), ids[24:33])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["data.train", "no such file"]),
        (b"", ["holds no document"]),
        (b"short", ["data.sequence_length=8", "less than one sequence"]),
    ],
)
def test_unusable_text_is_reported_in_one_line(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_corpus(text(path))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not a file"):
        load_corpus(text(tmp_path))


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros((3, 4), dtype=np.uint16), "one dimension"),
        (np.zeros(100, dtype=np.float32), "unsigned"),
        (np.zeros(0, dtype=np.uint16), "no tokens"),
    ],
)
def test_unusable_token_files(tmp_path: Path, array: np.ndarray, word: str) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(SettingsError, match=word):
        load_corpus(DataSettings(corpus=Corpus.tokens, train=[str(tmp_path / "x.npy")], sequence_length=8))


def test_a_token_file_is_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SettingsError, match=r"no \.npy file"):
        load_corpus(DataSettings(corpus=Corpus.tokens, train=[str(tmp_path / "x.npy")], sequence_length=8))


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", np.arange(300, dtype=np.uint16))
    manifest = Manifest([TokenFile("x.npy", 300, max_id=199, sha256="")], None, vocab_size=200)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(encode(manifest)))
    held_out = str(tmp_path / "y.npy")
    data = DataSettings(corpus=Corpus.tokens, train=[str(tmp_path)], validation=[held_out], sequence_length=8)
    with pytest.raises(SettingsError, match=rf"data\.validation={held_out}: holds id 299, .* has 200 by {tmp_path}"):
        load_corpus(data)


def test_the_byte_tokenizer_agrees_with_the_corpus(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    everything = "def f(x):\n\treturn 'ä€😀' # \x00\x7f  two  spaces\r\n"
    ids = tokenizer(everything)["input_ids"]
    assert ids == encode_bytes(everything.encode()).tolist()[:-1]
    assert tokenizer.decode(ids) == everything
    assert tokenizer.eos_token_id == END_OF_TEXT


def test_sequences_predict_every_token_but_the_first_once() -> None:
    store = TokenTable([np.arange(50, dtype=np.uint16)], sequence_length=7)
    targets = store.batch(np.arange(store.num_sequences)).tokens[:, 1:].flatten()
    assert targets.tolist() == list(range(1, 50))


def test_shards_are_disjoint_and_whole() -> None:
    shards = deal(101, 4, seed=3)
    assert sorted(number for shard in shards for number in ids_of_shard(shard)) == list(range(101))
    assert {shard.size for shard in shards} == {25, 26}


def test_each_sequence_is_used_once_per_epoch_whatever_the_batches() -> None:
    """Each sequence is used once per epoch: batches and workers change from round to round, updates straddle epochs."""
    rng = random.Random(1)
    table = TokenTable([np.zeros(138, np.uint16)], sequence_length=1)
    shard = ShardCursor(table, np.arange(100, 137), seed=5, trainer=2)
    seen: list[int] = []
    while shard.position < 37 * 6:
        workers, local_batch, updates = rng.randint(1, 4), rng.randint(1, 30), rng.randint(1, 5)
        total = workers * local_batch
        for update in range(updates):
            for worker in range(workers):
                seen += shard.peek(update * total + worker * local_batch, local_batch).tolist()
        shard.advance(local_batch, [updates] * workers, {})
    epochs = [seen[start : start + 37] for start in range(0, len(seen) - 36, 37)]
    assert all(Counter(epoch) == Counter(range(100, 137)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "a fresh order every epoch"


@pytest.mark.parametrize("seed", range(30))
def test_merges_lose_no_sequence_and_read_none_twice(seed: int) -> None:
    """Through merges, too: every id of a shard is read as often as the others, or once less if still unread."""
    rng = random.Random(seed)
    shards = dict(enumerate(deal(rng.randint(30, 90), rng.randint(2, 6), seed)))
    ids = {trainer: set(ids_of_shard(shard)) for trainer, shard in shards.items()}
    members = {trainer: [trainer] for trainer in shards}
    seen: Counter[int] = Counter()
    orders: dict[int, set[tuple[int, ...]]] = {trainer: set() for trainer in shards}
    for _ in range(60):
        trainer = rng.choice(list(shards))
        shard = shards[trainer]
        if len(shards) > 1 and rng.random() < 0.1:
            ended = rng.sample([other for other in shards if other != trainer], rng.randint(1, len(shards) - 1))
            shards[trainer] = shard.unite([shards[other] for other in ended])
            for other in ended:
                del shards[other]
                members[trainer] += members[other]
        elif shard.num_unread and rng.random() < 0.5:  # to the end of the epoch, where everything begins again
            count = shard.num_unread
            seen.update(shard.peek(0, count).tolist())
            advance(shard, count)
            order = tuple(ids_of_shard(shard))
            assert order not in orders[trainer], "a fresh order every epoch, also after merges"
            orders[trainer].add(order)
        else:
            count = rng.randint(1, 2 * shard.size)
            seen.update(shard.peek(0, count).tolist())
            advance(shard, count)
        for survivor, shard in shards.items():
            unread = set(shard.unread().tolist())
            assert len(unread) == shard.num_unread
            assert shard.size == sum(len(ids[member]) for member in members[survivor])
            for member in members[survivor]:
                maximum = max(seen[sequence] for sequence in ids[member])
                behind = {sequence for sequence in ids[member] if seen[sequence] < maximum}
                assert all(seen[sequence] == maximum - 1 for sequence in behind)
                assert behind in (unread & ids[member], set())


def test_shared_shards_hold_everything_each_in_an_order_of_its_own() -> None:
    first, second = deal(50, 2, 0, Shards.shared)
    assert sorted(first.peek(0, 50).tolist()) == sorted(second.peek(0, 50).tolist()) == list(range(50))
    assert first.peek(0, 50).tolist() != second.peek(0, 50).tolist()


def test_orders_are_the_same_on_every_machine() -> None:
    """The order of a shard is part of an experiment: frozen, so that no library changes it unseen."""
    assert permutation(8, 0, 1).tolist() == [3, 7, 4, 2, 1, 6, 5, 0]
    assert permutation(8, 0, 2).tolist() != [3, 7, 4, 2, 1, 6, 5, 0]
