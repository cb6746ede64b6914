"""Text to token ids: bytes as they are, or a tokenizer of transformers."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adloco_dist.config import DataSettings, SettingsError
from adloco_dist.data.hub import fetching
from adloco_dist.data.special_tokens import Found, SpecialTokens, end_of, vocabulary_size
from adloco_dist.text import reason

END_OF_TEXT = 256
"""Token id that ends every document of bytes; 0 to 255 are the bytes themselves."""
BYTE_VOCAB_SIZE = 257
END_TOKEN = "<|endoftext|>"

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
        backend = tokenizer.backend_tokenizer
        end, pad = end_of(backend, _one(tokenizer.eos_token_id)), _one(tokenizer.pad_token_id)
        return cls(vocabulary_size(backend), pad if pad is not None else end or 0, tokenizer, end)


class Encoder(Protocol):
    """Makes token ids of documents."""

    vocabulary: Vocabulary
    digest: str
    """Digest that differs between encoders."""

    def encode(self, texts: Sequence[Text], maximum: int | None = None) -> list[Tokens]:
        """The ids of every document, closed by the end token if there is one, cut off after `maximum`.

        Raises:
            SettingsError: a text cannot be encoded.
        """
        ...

    @property
    def found(self) -> Found:
        """What was found in the texts so far."""
        ...

    def take_notes(self) -> list[str]:
        """What a user should know of the tokenizer and of the texts since the last call, one line each."""
        ...


def load_encoder(data: DataSettings) -> Encoder:
    """The encoder that `data.tokenizer` names.

    Raises:
        SettingsError: there is no such tokenizer, or the hub cannot be reached.
    """
    return ByteEncoder() if data.tokenizer is None else TokenizerEncoder(data.tokenizer)


class ByteEncoder:
    """Every byte of UTF-8 is a token."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(BYTE_VOCAB_SIZE, END_OF_TEXT, byte_tokenizer(), END_OF_TEXT)
        self.digest = "bytes"
        self.found = Found()

    def encode(self, texts: Sequence[Text], maximum: int | None = None) -> list[Tokens]:
        return [
            encode_bytes(text if isinstance(text, bytes) else text.encode(errors="replace"))[:maximum] for text in texts
        ]

    def take_notes(self) -> list[str]:
        return []


class TokenizerEncoder:
    """A tokenizer of transformers, with its own template ([CLS] ... [SEP], <s> ...)."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: a directory, a tokenizer.json, or a model of the hub.
        """
        tokenizer = load_tokenizer("data.tokenizer", name)
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._name, self._special = name, SpecialTokens(
            name, tokenizer.backend_tokenizer, _one(tokenizer.eos_token_id), _one(tokenizer.unk_token_id),
            special.union(tokenizer.all_special_ids),
        )  # fmt: skip
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # the user's keeps its own settings
        self._backend.no_padding()
        self._maximum: int | None = None
        self._backend.no_truncation()
        # One thread: the ranks of a node share its cores, and training has them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.vocabulary = Vocabulary.of(tokenizer)
        self.digest = hashlib.sha256(self._backend.to_str().encode()).hexdigest()
        self._dtype = np.uint16 if self.vocabulary.size <= 1 << 16 else np.uint32

    @property
    def found(self) -> Found:
        return self._special.found

    def encode(self, texts: Sequence[Text], maximum: int | None = None) -> list[Tokens]:
        if maximum != self._maximum:  # so that what the template adds at the end stays
            self._maximum = maximum
            self._backend.no_truncation() if maximum is None else self._backend.enable_truncation(maximum)
        decoded = [text if isinstance(text, str) else text.decode(errors="replace") for text in texts]
        try:
            encodings = self._backend.encode_batch_fast(decoded)
        except Exception as error:  # which tokenizers raise as they are
            rule = "name one with an unknown token (unk_token), or with all bytes"
            detail = f"cannot encode a text ({reason(error)})"
            raise SettingsError(f"data.tokenizer={self._name}: {detail}; {rule}") from error
        return [np.array(self._special.closed(encoding.ids)[:maximum], dtype=self._dtype) for encoding in encodings]

    def take_notes(self) -> list[str]:
        return self._special.take_notes()


def _one(id_: object) -> int | None:
    """The id of a special token; transformers' types allow several."""
    return id_ if isinstance(id_, int) else None


def load_tokenizer(setting: str, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a directory, a tokenizer.json, or the hub.

    Raises:
        SettingsError: there is none that can be read.
    """
    with fetching(setting, name, "name a folder or a tokenizer.json, or leave it out for bytes"):
        if name.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SettingsError(f"{setting}={name}: has no tokenizer.json, which is needed; save a fast tokenizer")
    return tokenizer


def train_tokenizer(texts: Iterable[Text], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, learnt from `texts`; the same for the same texts.

    Args:
        size: maximum size of its vocabulary: 256 bytes, the end token, and merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=size, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    decoded = (text if isinstance(text, str) else text.decode(errors="replace") for text in texts)
    tokenizer.train_from_iterator(decoded, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)


def encode_bytes(document: bytes) -> Tokens:
    """The bytes of one document as token ids, closed by `END_OF_TEXT`."""
    tokens = np.empty(len(document) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
    tokens[-1] = END_OF_TEXT
    return tokens


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `encode_bytes` for transformers: one token per byte of UTF-8, id = byte."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    # pyright does not see that these two properties of the Rust class may be assigned.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 characters stand for themselves, the rest for U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
