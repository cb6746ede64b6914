"""Tokenizers as they are found train rightly, directly and through token files, or are named with what it means."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from adloco_dist.config import DataSettings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, files_of, load_corpus
from adloco_dist.data.encoding import load_encoder
from adloco_dist.data.row_streams import BLOCK_SEQUENCES
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.tools.tokenize import Unit, tokenize_unit
from helpers.found_tokenizers import TEXT, WORDS, of_bytes, of_letters, of_words, templated, written

pytestmark = pytest.mark.stranger


@dataclass(frozen=True)
class Case:
    make: Callable[[], Tokenizer]
    special: dict[str, Any]
    texts: tuple[str, ...]
    ids: list[int]
    """What all texts become, one after the other."""
    size: int
    """Of the vocabulary."""
    notes: tuple[str, ...] = ()


def word(text: LiteralString) -> int:
    """Its id in `of_words`."""
    return 1 + WORDS.index(text)


ENDED = {"bos_token": "<s>", "eos_token": "</s>"}
NO_END = "has no end token: nothing marks where a document ends"
SPELLED = "texts spell out {} of its special tokens ({})"
CAT, THE = (of_bytes().encode(text).ids for text in ("the cat", "the"))
BYTES = of_bytes().get_vocab_size()
CASES = {
    "gaps": Case(
        lambda: of_words(spacing=9000), {"unk_token": "[UNK]"}, ("the cat",), [9000 * word("the"), 9000 * word("cat")],
        9000 * len(WORDS) + 1, (NO_END, f"has ids up to {9000 * len(WORDS):,} for {len(WORDS) + 1} tokens"),
    ),
    "unknown words": Case(
        of_words, {"unk_token": "[UNK]"}, ("the horse sat", "a"), [word("the"), 0, word("sat"), 0], len(WORDS) + 1,
        (NO_END, "2 of 4 tokens are its unknown token [UNK]: what they stood for is lost"),
    ),
    "letters": Case(
        of_letters, {}, ("cat!",), of_letters().encode("cat").ids, len(set(TEXT)),
        (NO_END, "characters that it does not know are left out of the text"),
    ),
    "no end": Case(
        of_bytes, {"bos_token": "<s>"}, ("the cat", "the"), CAT + THE, BYTES, (NO_END,)
    ),
    "an end": Case(of_bytes, ENDED, ("the cat", "the"), [*CAT, 1, *THE, 1], BYTES),
    "control tokens in the text": Case(
        of_bytes, ENDED, ("the cat<|im_end|>the", "the</s>the"), [*CAT, 2, *THE, 1, *THE, 1, *THE, 1],
        BYTES, (SPELLED.format(2, "<|im_end|>, </s>"),),
    ),
    "an end that the text brings": Case(
        of_bytes, ENDED, ("the cat</s>",), [*CAT, 1], BYTES, (SPELLED.format(1, "</s>"),)
    ),
    "a template": Case(
        lambda: templated(of_bytes(), "<s> $A </s>"), ENDED, ("the cat", "the"), [0, *CAT, 1, 0, *THE, 1], BYTES
    ),
    "a template, and what the text brings": Case(
        lambda: templated(of_bytes(), "<s> $A </s>"), ENDED, ("<s>the cat</s>",), [0, *CAT, 1], BYTES,
        (SPELLED.format(2, "<s>, </s>"),),
    ),
    "a template that begins": Case(
        lambda: templated(of_bytes(), "<s> $A"), ENDED, ("the cat", "<s>the"), [0, *CAT, 1, 0, *THE, 1], BYTES,
        (SPELLED.format(1, "<s>"),),
    ),
    "a template with an end of its own": Case(
        lambda: templated(of_bytes(), "<s> $A <|im_end|>"), ENDED, ("the cat",), [0, *CAT, 2], BYTES
    ),
    "a template, and no end token": Case(
        lambda: templated(of_bytes(), "<s> $A </s>"), {}, ("the cat",), [0, *CAT, 1], BYTES
    ),
}  # fmt: skip


def data(folder: Path, tokenizer: str, texts: tuple[str, ...], *overrides: str) -> DataSettings:
    for name, rows in (("train", texts), ("validation", (TEXT,))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    files = [f"data.{name}=[{folder / name}.jsonl]" for name in ("train", "validation")]
    return compose(["data=json", *files, f"data.tokenizer={tokenizer}", "data.sequence_length=1", *overrides]).data


def loaded(data: DataSettings) -> tuple[TextSplits, list[int]]:
    splits = load_corpus(data)
    assert isinstance(splits.table, TokenTable)
    return splits, np.concatenate(splits.table.parts).tolist()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_directly(case: Case, tmp_path: Path) -> None:
    name = written(tmp_path / "found", case.make(), **case.special)
    splits, ids = loaded(data(tmp_path, name, case.texts))
    assert ids == case.ids
    assert splits.vocabulary.size == case.size > max(ids)
    of_texts = [note for note in splits.notes if "validation" not in note]
    assert len(of_texts) == len(case.notes)
    for note, expected in zip(of_texts, case.notes, strict=True):
        assert note.startswith(f"data.tokenizer={name}: ") and "\n" not in note
        # The validation text is known to every tokenizer, so it adds tokens, and nothing to be said.
        assert expected in note.replace(f"of {4 + len(TEXT.split())} tokens", "of 4 tokens")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_through_token_files(case: Case, tmp_path: Path) -> None:
    settings = data(tmp_path, written(tmp_path / "found", case.make(), **case.special), case.texts)
    train, _ = files_of(settings)
    files, _, found = tokenize_unit(tmp_path, Unit("00000", train.files), train, settings, 1000)
    assert np.load(tmp_path / files[0].name).tolist() == case.ids
    encoder = load_encoder(settings)
    encoder.counts.update(found)
    notes = encoder.take_notes()
    assert len(notes) == len(case.notes)
    assert all(expected in note for expected, note in zip(case.notes, notes, strict=True))


@pytest.mark.parametrize("make", [lambda: of_words(unknown=None)])
def test_a_text_that_cannot_be_encoded_is_named(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    name = written(tmp_path / "found", make())
    with pytest.raises(
        SettingsError, match=r"cannot encode a text \(.*UNK.*\); name one with an unknown token"
    ) as error:
        load_corpus(data(tmp_path, name, ("the horse",)))
    assert str(error.value).startswith(f"data.tokenizer={name}: ")


def test_a_stream_reports_what_it_meets_and_again_when_there_is_ten_times_as_much(tmp_path: Path) -> None:
    name = written(tmp_path / "found", of_bytes(), **ENDED)
    settings = data(tmp_path, name, ("the cat sat on the mat",) * 9 + ("the<|im_end|>",), "data.streaming=true")
    splits = load_corpus(settings)
    assert splits.notes == ()
    (cursor,) = splits.train.deal(1, 1, settings.shards, 0)
    for update in range(BLOCK_SEQUENCES):
        cursor.batch(0, update, 4, (update + 1,))
    notes = splits.train.take_notes()
    assert len(notes) == 1 and "of its special tokens (<|im_end|>)" in notes[0]
    assert splits.train.take_notes() == []


def test_a_tokenizer_json_alone_says_what_it_lacks(tmp_path: Path) -> None:
    written(tmp_path / "found", of_bytes(), **ENDED)
    splits, ids = loaded(data(tmp_path, str(tmp_path / "found" / "tokenizer.json"), ("the cat", "the")))
    assert ids == CAT + THE
    assert "name the folder of this tokenizer.json that has eos_token in its tokenizer_config.json" in splits.notes[0]


def test_a_cut_document_leaves_the_tokenizer_as_it_was_found(tmp_path: Path) -> None:
    name = written(tmp_path / "found", of_bytes(), **ENDED)
    splits = load_corpus(data(tmp_path, name, (TEXT,), "data.packing=document", "data.sequence_length=2"))
    assert splits.vocabulary.tokenizer is not None
    assert splits.vocabulary.tokenizer.backend_tokenizer.truncation is None


@pytest.mark.parametrize("missing", [1, 20])
def test_a_model_that_lacks_ids_of_its_tokenizer_is_refused(missing: int, tmp_path: Path) -> None:
    name = written(tmp_path / "found", of_bytes(), **ENDED)
    splits, _ = loaded(data(tmp_path, name, ("the cat",)))
    overrides = ["model=nano", f"+model.overrides.vocab_size={BYTES - missing}"]
    with pytest.raises(SettingsError, match=f"set at least {BYTES}, or leave it out"):
        LanguageObjective.fitted(compose(overrides), splits.vocabulary)


def test_a_model_with_more_ids_than_its_tokenizer_trains(tmp_path: Path) -> None:
    name = written(tmp_path / "found", of_bytes(), **ENDED)
    splits, _ = loaded(data(tmp_path, name, ("the cat",)))
    settings = compose(["model=nano", "+model.overrides.vocab_size=1024"])
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    assert objective.config.vocab_size == 1024 > len(AutoTokenizer.from_pretrained(name))
