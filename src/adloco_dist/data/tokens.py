"""Token stores, the byte tokenizer, and how a store becomes sequences.

Shape suffixes: B sequences, L tokens of a sequence that are predicted (a stored sequence has L + 1).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = 256
"""Token id that ends every document of a byte corpus; 0 to 255 are the bytes themselves."""
BYTE_VOCAB_SIZE = 257

Tokens = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class TokenStore:
    """A one-dimensional array of token ids (in memory or memory-mapped), cut into sequences.

    Sequence s covers tokens[s * L : s * L + L + 1]: neighbours share one token, so each token but the first is
    predicted exactly once.
    """

    tokens: Tokens
    sequence_length: int

    @property
    def num_sequences(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def sequences(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """The sequences `ids` as int64, shape (B, L + 1), on the CPU."""
        offsets = np.arange(self.sequence_length + 1)
        return torch.from_numpy(self.tokens[ids[:, None] * self.sequence_length + offsets].astype(np.int64))


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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 characters stand for themselves, the rest for U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
