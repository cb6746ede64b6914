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

from adloco_dist.config import DataSettings, SettingsError
from adloco_dist.data.hub import fetching
from adloco_dist.data.special_tokens import end_of, lacks_of, single_id, special_ids, template_of, vocabulary_size
from adloco_dist.text import one_line, reason

END_OF_TEXT = 256
"""Token id that ends every document of bytes; 0 to 255 are the bytes themselves."""
BYTE_VOCAB_SIZE = 257
END_TOKEN = "<|endoftext|>"
ALL = -1
"""Of an encoder's counts: the number of all tokens."""
SHOWN = 3
"""Maximum number of special tokens that a note names."""
GROWTH = 10
"""What has been reported is reported again when there is so many times as much of it."""

Tokens = npt.NDArray[np.unsignedinteger]
Text = str | bytes


@dataclass(frozen=True)
class Vocabulary:
    """What a model must know of the ids that it is given."""

    size: int
    pad: int = 0
    """What sequences are filled up with; it never counts."""
    tokenizer: PreTrainedTokenizerFast | None = None
    """The tokenizer that belongs to the model; None: unknown, as of plain token files."""
    end: int | None = None
    """What ends a document; None: nothing does, or it is unknown."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> "Vocabulary":
        """The vocabulary of a tokenizer; its end token fills up sequences where it has no padding token."""
        end, pad = end_of(tokenizer), single_id(tokenizer.pad_token_id)
        return cls(vocabulary_size(tokenizer.backend_tokenizer), pad if pad is not None else end or 0, tokenizer, end)


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
        counts: what was found in the texts so far: ids of special tokens that they spell out, ids of the unknown token,
            and at `ALL` all ids.
    """

    def __init__(self, name: str) -> None:
        """The name is that of a directory, a tokenizer.json, or a model of the hub."""
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
        self._prefix, self._suffix = template_of(self._backend)
        self._unknown = single_id(tokenizer.unk_token_id)
        self._is_counted = np.zeros(self.vocabulary.size, dtype=bool)
        self._is_counted[[*special_ids(tokenizer)]] = True
        self.counts: Counter[int] = Counter()
        self._notes, self._reported = lacks_of(tokenizer, name.endswith(".json")), Counter[str]()

    def encode(self, texts: Sequence[Text], maximum: int | None = None) -> list[Tokens]:
        """The ids of every document, closed by the end token if there is one, cut off after `maximum`; raises a
        SettingsError where a text cannot be encoded."""
        if maximum != self._maximum:  # so that what the template adds at the end stays
            self._maximum = maximum
            self._backend.no_truncation() if maximum is None else self._backend.enable_truncation(maximum)
        try:
            encodings = self._backend.encode_batch_fast([*_as_strings(texts)])
        except Exception as error:  # which tokenizers raise as they are
            rule = "name one with an unknown token (unk_token), or with all bytes"
            detail = f"cannot encode a text ({reason(error)})"
            raise SettingsError(f"data.tokenizer={self._name}: {detail}; {rule}") from error
        return [np.array(self._closed(encoding.ids)[:maximum], dtype=self._dtype) for encoding in encodings]

    def _closed(self, ids: list[int]) -> list[int]:
        """A document as it is trained on, from what the tokenizer made of it, the template included; counts it.

        The template's own tokens are not added to those that the text spells out where it begins and ends; the end
        token closes a document that no template closes.
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
        """What a user should know, one line each; of what is counted, again when there is ten times as much."""
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
        """Whether a count is to be reported, now or because there is so much more than was reported."""
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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=size, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_as_strings(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)


def _as_strings(texts: Iterable[Text]) -> Iterator[str]:
    return (text if isinstance(text, str) else text.decode(errors="replace") for text in texts)


def as_bytes(text: Text) -> bytes:
    """Text as UTF-8."""
    return text if isinstance(text, bytes) else text.encode(errors="replace")


def encode_bytes(document: bytes) -> Tokens:
    """The bytes of one document as token ids, closed by `END_OF_TEXT`."""
    tokens = np.empty(len(document) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
    tokens[-1] = END_OF_TEXT
    return tokens


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `encode_bytes` for transformers: one token per byte of UTF-8, id = byte, in GPT-2's alphabet."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # pyright does not see that these two properties of the Rust class may be assigned.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)
