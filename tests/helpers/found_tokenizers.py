"""Tokenizers as they are found, in folders."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the cat sat on the mat and the dog ran off with the hat"
WORDS = sorted(set(TEXT.split()))


def of_words(spacing: int = 1, unknown: str | None = "[UNK]") -> Tokenizer:
    """A tokenizer of whole words with ids `spacing` apart."""
    words = [*([unknown] if unknown else []), *WORDS]
    vocabulary = {word: number * spacing for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))  # pyright: ignore[reportCallIssue, reportArgumentType]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def of_bytes(special: tuple[str, ...] = ("<s>", "</s>", "<|im_end|>", "<pad>")) -> Tokenizer:
    """A byte-level tokenizer of a few merges; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=300, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return tokenizer


def of_letters() -> Tokenizer:
    """BPE of the letters of `TEXT` alone, without an unknown token."""
    return Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(set(TEXT)))}, []))


def templated(tokenizer: Tokenizer, single: str) -> Tokenizer:
    tokens = [(token, tokenizer.token_to_id(token)) for token in single.split() if not token.startswith("$")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def written(folder: Path, tokenizer: Tokenizer, **special: Any) -> str:
    """Save it as transformers do, with its special tokens; returns the folder."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return str(folder)
