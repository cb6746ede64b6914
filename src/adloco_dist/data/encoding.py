"""Text to token ids: bytes as they are, or a tokenizer of transformers."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from adloco_dist.config import DataSettings, SettingsError, refused
from adloco_dist.data.hub import fetching
from adloco_dist.text import one_line

END_OF_TEXT = 256
"""Token id that ends every document of bytes; 0 to 255 are the bytes themselves."""
BYTE_VOCAB_SIZE = 257
END_TOKEN = "<|endoftext|>"
ALL = -1
"""The key of an encoder's counts under which all tokens are counted."""
SHOWN = 3
"""Maximum number of special tokens that a note names."""
GROWTH = 10
"""A count is reported again when it has grown by this factor."""

Tokens = npt.NDArray[np.unsignedinteger]
Text = str | bytes


@dataclass(frozen=True)
class Vocabulary:
    """What a model must know of its token ids."""

    size: int
    pad: int = 0
    """What fills sequences up; it never counts."""
    tokenizer: PreTrainedTokenizerFast | None = None
    """The tokenizer that belongs to the model; None: unknown, as of plain token files."""
    end: int | None = None
    """What ends a document; None: nothing does, or it is unknown."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> "Vocabulary":
        """The vocabulary of a tokenizer. A document ends with the last token of the template, where that puts one
        there, or with the end token, which fills sequences up, too, where there is no padding token."""
        backend = tokenizer.backend_tokenizer
        size = max(backend.get_vocab().values(), default=0) + 1  # ids may have gaps
        _, suffix = _template(backend)
        end = suffix[-1] if suffix else _single_id(tokenizer.eos_token_id)
        pad = _single_id(tokenizer.pad_token_id)
        return cls(size, pad if pad is not None else end or 0, tokenizer, end)


class ByteEncoder:
    """Every byte of UTF-8 is a token."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(BYTE_VOCAB_SIZE, END_OF_TEXT, byte_tokenizer(), END_OF_TEXT)
        self.digest = "bytes"
        self.counts: Counter[int] = Counter()

    def encode(self, texts: Sequence[Text], maximum: int | None = None) -> list[Tokens]:
        return [encode_bytes(as_bytes(text))[:maximum] for text in texts]

    def take_notes(self) -> list[str]:
        return []


class TokenizerEncoder:
    """A tokenizer of transformers, with its own template ([CLS] ... [SEP], <s> ...).

    Attributes:
        digest: differs between encoders.
        counts: the number of each special token that the texts so far spell out, of the unknown token, and at `ALL` of
            all tokens.
    """

    def __init__(self, name: str) -> None:
        """`name` is a directory, a tokenizer.json, or a model of the hub."""
        tokenizer = load_tokenizer("data.tokenizer", name)
        self._name = name
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # the user's keeps its own settings
        self._backend.no_padding()
        self._maximum: int | None = None
        self._backend.no_truncation()
        # One thread: the ranks of a node share its cores, and training has them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.vocabulary = Vocabulary.of(tokenizer)
        self.digest = hashlib.sha256(self._backend.to_str().encode()).hexdigest()
        self._dtype = np.uint16 if self.vocabulary.size <= 1 << 16 else np.uint32
        self._prefix, self._suffix = _template(self._backend)
        self._unknown = _single_id(tokenizer.unk_token_id)
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._is_counted = np.zeros(self.vocabulary.size, dtype=bool)
        self._is_counted[[*special.union(tokenizer.all_special_ids)]] = True
        self.counts: Counter[int] = Counter()
        self._notes = _what_is_lacking(tokenizer.backend_tokenizer, self.vocabulary, name.endswith(".json"))
        self._reported: Counter[str] = Counter()

    def encode(self, texts: Sequence[Text], maximum: int | None = None) -> list[Tokens]:
        """The ids of every document, closed by the end token if there is one, cut off after `maximum`; raises a
        SettingsError where a text cannot be encoded."""
        if maximum != self._maximum:  # the tokenizer truncates, because it keeps the end of the template
            self._maximum = maximum
            self._backend.no_truncation() if maximum is None else self._backend.enable_truncation(maximum)
        rule = "name one with an unknown token (unk_token), or with all bytes"
        with refused(f"data.tokenizer={self._name}: cannot encode a text", rule):
            encodings = self._backend.encode_batch_fast([*_as_strings(texts)])
        return [np.array(self._closed(encoding.ids)[:maximum], dtype=self._dtype) for encoding in encodings]

    def _closed(self, ids: list[int]) -> list[int]:
        """The ids of a document as it is trained on, from the tokenizer's ids with its template; counts them.

        Where the text itself begins or ends with a token of the template, it is not there twice; the end token closes a
        document that no template closes.
        """
        start, stop, end = len(self._prefix), len(ids) - len(self._suffix), self.vocabulary.end
        inner = ids[start:stop]
        if inner:
            array = np.array(inner)
            self.counts.update(array[self._is_counted[array]].tolist())
            self.counts[ALL] += len(inner)
        if self._prefix and inner[:1] == self._prefix[-1:]:
            inner = inner[1:]
        if self._suffix and inner[-1:] == self._suffix[:1]:
            inner = inner[:-1]
        closed = [*ids[:start], *inner, *ids[stop:]]
        return closed if end is None or closed[-1:] == [end] else [*closed, end]

    def take_notes(self) -> list[str]:
        """What a user should know, one line each; counts again when they are `GROWTH` times as large."""
        notes, self._notes = self._notes, []
        counts = dict(self.counts)  # which other threads add to
        spelled = Counter({id_: count for id_, count in counts.items() if id_ not in (ALL, self._unknown)})
        if self._is_due("spelled", spelled.total()):
            names = ", ".join(str(self._backend.id_to_token(id_)) for id_, _ in spelled.most_common(SHOWN))
            rule = "each became that control token, as in a template; where it is only text, spell it otherwise"
            notes.append(f"texts spell out {spelled.total():,} of its special tokens ({names}): {rule}")
        if self._unknown is not None and self._is_due("unknown", self.counts[self._unknown]):
            detail = f"{self.counts[self._unknown]:,} of {self.counts[ALL]:,} tokens are its unknown token"
            name = self._backend.id_to_token(self._unknown)
            notes.append(f"{detail} {name}: what they stood for is lost to the model")
        return [one_line(f"data.tokenizer={self._name}: {note}") for note in notes]

    def _is_due(self, kind: str, count: int) -> bool:
        """Whether a count is to be reported now; notes that it was."""
        is_due = count > 0 and count >= GROWTH * self._reported[kind]
        if is_due:
            self._reported[kind] = count
        return is_due


Encoder = ByteEncoder | TokenizerEncoder


def load_encoder(data: DataSettings) -> Encoder:
    """The encoder that `data.tokenizer` names; raises a SettingsError where there is no such tokenizer, or the hub
    cannot be reached."""
    return ByteEncoder() if data.tokenizer is None else TokenizerEncoder(data.tokenizer)


def load_tokenizer(setting: str, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a directory, a tokenizer.json, or the hub; raises a SettingsError where there is none that can
    be read."""
    with fetching(setting, name, "name a folder or a tokenizer.json, or leave it out for bytes"):
        if name.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SettingsError(f"{setting}={name}: has no tokenizer.json, which is needed; save a fast tokenizer")
    return tokenizer


def train_tokenizer(texts: Iterable[Text], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 256 bytes, the end token, and merges, `size` ids at most, learnt from `texts`; the
    same for the same texts."""
    tokenizer = _byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=size, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_as_strings(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)


def _as_strings(texts: Iterable[Text]) -> Iterator[str]:
    return (text if isinstance(text, str) else text.decode(errors="replace") for text in texts)


def as_bytes(text: Text) -> bytes:
    """Text in UTF-8."""
    return text if isinstance(text, bytes) else text.encode(errors="replace")


def encode_bytes(document: bytes) -> Tokens:
    """The bytes of one document as token ids, closed by `END_OF_TEXT`."""
    return np.append(np.frombuffer(document, dtype=np.uint8), np.uint16(END_OF_TEXT))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `encode_bytes` for transformers: one token per byte of UTF-8, id = byte, in GPT-2's alphabet."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)


def _byte_level(model: models.BPE, use_regex: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(model)
    # pyright does not see that these two properties of the Rust class may be assigned.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _single_id(token: object) -> int | None:
    """The id of a special token; transformers' types allow several."""
    return token if isinstance(token, int) else None


def _template(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after every document."""
    by_id = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    for text in ("a", *(token for token, _ in by_id)):
        try:
            inner = backend.encode(text, add_special_tokens=False)
        except Exception:  # it has no token for this text
            continue
        if inner.ids:
            length, whole = len(inner.ids), backend.post_process(inner)
            start = whole.special_tokens_mask.index(0)
            return whole.ids[:start], whole.ids[start + length :]
    return [], []


def _what_is_lacking(backend: Tokenizer, vocabulary: Vocabulary, is_file: bool) -> list[str]:
    """What a user should know that a tokenizer, of a folder or a tokenizer.json alone, lacks."""
    lacks, num_tokens, size = [], backend.get_vocab_size(), vocabulary.size
    if vocabulary.end is None:
        detail = "has no end token: nothing marks where a document ends, and generated text does not end by itself"
        where = "the folder of this tokenizer.json" if is_file else "one"
        lacks.append(f"{detail}; name {where} that has eos_token in its tokenizer_config.json")
    if size > num_tokens:
        detail = f"has ids up to {size - 1:,} for {num_tokens:,} tokens"
        lacks.append(f"{detail}: the model has {size:,} ids, {size - num_tokens:,} of which nothing is trained for")
    if _loses_characters(backend):
        detail = "has no unknown token, and not every byte in its vocabulary"
        lacks.append(f"{detail}: characters that it does not know are left out of the text")
    return lacks


def _loses_characters(backend: Tokenizer) -> bool:
    """Whether characters that are in no token are left out: other models than BPE fail there."""
    model, vocabulary = backend.model, backend.get_vocab()
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return False
    if model.byte_fallback:
        return "<0x00>" not in vocabulary
    is_of_bytes = "ByteLevel" in str(backend.pre_tokenizer)
    return not is_of_bytes or not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
