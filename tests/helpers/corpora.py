"""Corpora that tests make: C4-format shards of numbered documents, and a tokenizer learnt from them."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adloco_dist.data.encoding import train_tokenizer

WORDS = ("river", "stone", "light", "garden", "winter", "letter", "engine", "window", "silver", "morning")


def numbered_document(number: int) -> str:
    """Words in an order of their own, after a number by which the document is known again."""
    rng = np.random.default_rng(number)
    count = int(rng.integers(3, 30))
    return f"<{number}> " + " ".join(WORDS[place] for place in rng.integers(0, len(WORDS), count))


def write_shards(folder: Path, sizes: Sequence[int], name: str = "c4-train", first: int = 0) -> list[str]:
    """C4's own format: gzipped JSON lines. Documents are numbered through all shards.

    Returns:
        The texts, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for shard, size in enumerate(sizes):
        with gzip.open(folder / f"{name}.{shard:05}-of-{len(sizes):05}.json.gz", "wt", encoding="utf-8") as file:
            for _ in range(size):
                texts.append(numbered_document(first + len(texts)))
                content = {"text": texts[-1], "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
                file.write(json.dumps(content) + "\n")
    return texts


def write_streams(folder: Path) -> tuple[str, ...]:
    """A small corpus that is streamed from three shards; the settings that name it."""
    write_shards(folder, (70, 50, 90))
    write_shards(folder, [20], "c4-validation", first=10_000)
    files = (f"data.train=[{folder}/c4-train*]", f"data.validation=[{folder}/c4-validation*]")
    return ("data=json", "data.streaming=true", *files)


def write_tokenizer(folder: Path, texts: Sequence[str], size: int = 400) -> Path:
    """A BPE tokenizer learnt from `texts`."""
    train_tokenizer(texts, size).save_pretrained(folder)
    return folder
