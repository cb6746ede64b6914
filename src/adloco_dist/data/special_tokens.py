"""What a tokenizer does beside encoding text: ends, templates, control tokens that a text spells out, unknown ones."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from adloco_dist.text import one_line

SHOWN = 3
"""Maximum number of special tokens that a note names."""
GROWTH = 10
"""What has been reported is reported again when there is so many times as much of it."""


@dataclass
class Found:
    """What was found in the texts that an encoder was given."""

    tokens: int = 0
    unknown: int = 0
    """Tokens that stand for text that the tokenizer does not know."""
    spelled: Counter[int] = field(default_factory=Counter)
    """Special tokens that texts spell out, by id."""

    def add(self, other: "Found") -> None:
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.spelled.update(other.spelled)


class SpecialTokens:
    """The special tokens of one tokenizer.

    Attributes:
        end: id that ends every document; None: there is none.
        found: what was found so far.
    """

    def __init__(
        self, name: str, backend: Tokenizer, end: int | None, unknown: int | None, special: Iterable[int]
    ) -> None:
        """
        Args:
            name: of the tokenizer, for notes.
            end: its end token.
            unknown: its unknown token.
            special: ids of all its special tokens.
        """
        self._name, self._backend, self._unknown = name, backend, unknown
        self._prefix, self._suffix = template_of(backend)
        self.end = end_of(backend, end)
        self._is_special = np.zeros(vocabulary_size(backend), dtype=bool)
        self._is_special[[id_ for id_ in special if id_ != unknown]] = True
        self.found = Found()
        self._reported = Found()
        self._notes = self._of_tokenizer()

    def closed(self, ids: list[int]) -> list[int]:
        """A document as it is trained on, and count what is in it.

        The template's own tokens are not added to those that the text spells out where it begins and ends; the end
        token closes a document that no template closes.

        Args:
            ids: what the tokenizer made of the document, its template's tokens included.
        """
        start, stop = len(self._prefix), len(ids) - len(self._suffix)
        inner = ids[start:stop]
        self._count(inner)
        if self._prefix and inner[:1] == self._prefix[-1:]:
            inner = inner[1:]
        if self._suffix and inner[-1:] == self._suffix[:1]:
            inner = inner[:-1]
        closed = [*ids[:start], *inner, *ids[stop:]]
        return closed if self.end is None or closed[-1:] == [self.end] else [*closed, self.end]

    def take_notes(self) -> list[str]:
        """What a user should know, one line each; of what is counted, again when there is ten times as much."""
        notes, self._notes = self._notes, []
        count, found = self.found.spelled.total(), self.found
        if count and count >= GROWTH * self._reported.spelled.total():
            self._reported.spelled = found.spelled.copy()
            names = [str(self._backend.id_to_token(id_)) for id_, _ in found.spelled.most_common(SHOWN)]
            detail = f"texts spell out {count:,} of its special tokens ({', '.join(names)})"
            rule = (
                "each became that control token, as a template's own would; where it is only text, spell it otherwise"
            )
            notes.append(f"{detail}: {rule}")
        if found.unknown and found.unknown >= GROWTH * self._reported.unknown:
            self._reported.unknown = found.unknown
            detail = f"{found.unknown:,} of {found.tokens:,} tokens are its unknown token"
            name = self._backend.id_to_token(self._unknown) if self._unknown is not None else ""
            notes.append(f"{detail} {name}: what they stood for is lost to the model")
        return [one_line(f"data.tokenizer={self._name}: {note}") for note in notes]

    def _count(self, ids: list[int]) -> None:
        if not ids:
            return
        array = np.array(ids)
        self.found.tokens += len(ids)
        if self._unknown is not None:
            self.found.unknown += int(np.count_nonzero(array == self._unknown))
        spelled = array[self._is_special[array]]
        if len(spelled):
            self.found.spelled.update(spelled.tolist())

    def _of_tokenizer(self) -> list[str]:
        """What there is to say of the tokenizer itself."""
        notes, num_tokens, size = [], self._backend.get_vocab_size(), len(self._is_special)
        if self.end is None:
            detail = "has no end token: nothing marks where a document ends, and generated text does not end by itself"
            where = "the folder of this tokenizer.json" if self._name.endswith(".json") else "one"
            notes.append(f"{detail}; name {where} that has eos_token in its tokenizer_config.json")
        if size > num_tokens:
            detail = f"has ids up to {size - 1:,} for {num_tokens:,} tokens"
            notes.append(f"{detail}: the model has {size:,} ids, {size - num_tokens:,} of which nothing is trained for")
        if _loses_characters(self._backend):
            detail = "has no unknown token, and not every byte in its vocabulary"
            notes.append(f"{detail}: characters that it does not know are left out of the text")
        return notes


def vocabulary_size(backend: Tokenizer) -> int:
    """Largest id + 1: ids may have gaps."""
    return max(backend.get_vocab().values(), default=0) + 1


def end_of(backend: Tokenizer, end: int | None) -> int | None:
    """What ends a document: the last token of the template, where it puts one there, or the end token."""
    _, suffix = template_of(backend)
    return suffix[-1] if suffix else end


def template_of(backend: Tokenizer) -> tuple[list[int], list[int]]:
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


def _loses_characters(backend: Tokenizer) -> bool:
    """Whether characters that are in no token are left out: other models than BPE fail there."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return False
    vocabulary = backend.get_vocab()
    if model.byte_fallback:
        return "<0x00>" not in vocabulary
    is_of_bytes = "ByteLevel" in str(backend.pre_tokenizer)
    return not is_of_bytes or not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
