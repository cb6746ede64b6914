"""What a run would be trained on, before it is: `launch/check_data.py key=value ...`."""

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from adloco_dist.command import as_tool
from adloco_dist.config import Settings, SettingsError, require
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.data.hub import prefer_cache_without_hub
from adloco_dist.data.streams import StreamError
from adloco_dist.data.tokens import TextTable, TokenBatch
from adloco_dist.objective.losses import losses_of
from adloco_dist.policy.evaluation import perplexity
from adloco_dist.terminal import new_console, new_table, reported_wait
from adloco_dist.text import one_line

WINDOW_TOKENS = 32
"""Length of the pieces of text that are looked for in both splits."""
SAMPLE_CHARACTERS = 200
KNOWN = 1e4
"""Logit of the right answer of a model that knows it."""
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles of the sequences' lengths that are shown."""
TOLERANCE = 1e-4
TABLE_WIDTH = 120
OVERLAP_TOKENS = 20_000_000
"""Maximum number of training tokens that validation is compared with."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/check_data.py; exits with 2 where something is wrong."""
    parser = argparse.ArgumentParser(description="Show samples, counts, lengths, padding and overlap of a corpus.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for launch/train.py")
    parser.add_argument("--sequences", type=int, default=2000, help="of each split that are looked at (%(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="sequences of each split that are shown (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    with as_tool():
        require(options.sequences >= 1, "--sequences", options.sequences, "must be >= 1")
        require(options.samples >= 0, "--samples", options.samples, "must be >= 0")
        check_data(compose(options.overrides), options.sequences, options.samples)


def check_data(settings: Settings, num_sequences: int, num_samples: int) -> None:
    """Print what is found; raises a SettingsError where the corpus cannot be read, or its losses come out wrong."""
    console = new_console(min_width=TABLE_WIDTH)
    console.soft_wrap = True
    with reported_wait(lambda: "reading the corpus: still at it"):
        prefer_cache_without_hub(settings.data.hub, settings.data.tokenizer)
        splits = load_corpus(settings.data, settings.seed)
    console.print(f"{splits.source}; digest {splits.digest[:16]}; vocabulary of {splits.vocabulary.size:,} tokens")
    of_train = _of_train(splits, settings, num_sequences)
    seen = {"train": of_train, "validation": _spread(splits.validation, num_sequences)}
    for note in [*splits.notes, *splits.train.take_notes()]:
        console.print(one_line(f"note: {note}"))
    console.print(_table(splits, seen, settings))
    if splits.labels:
        console.print(_label_table(splits.labels, seen))
    else:
        maximum = OVERLAP_TOKENS // settings.data.sequence_length
        train = seen["train"] if splits.table is None else _spread(splits.table, maximum)
        share, tokens = overlap(_tokens(train), _tokens(seen["validation"])), train.total_targets
        pieces = f"validation's pieces of {WINDOW_TOKENS} tokens occur in training too ({tokens:,} tokens compared)"
        console.print(f"{share:.2%} of {pieces}")
    classes = len(splits.labels or ()) or splits.vocabulary.size
    check_losses(seen["validation"], classes)
    console.print(f"perplexity: 1 for a model that knows the answer, {classes:,} for one that guesses: as it must be")
    for name, batch in seen.items():
        for place in range(min(num_samples, len(batch))):
            console.print(one_line(f"{name}: {_sample(batch, place, splits)}"))


def check_losses(batch: TokenBatch, num_classes: int) -> None:
    """Raise a SettingsError unless the losses of two models whose perplexity is known come out right."""
    batch = batch.part(0, min(len(batch), 8))
    answers = batch.tokens[:, 1:] if batch.labels is None else batch.labels
    largest = int(answers.max())
    if largest >= num_classes:
        raise SettingsError(f"data: holds id {largest}, beyond the {num_classes} that there are; check the tokenizer")
    knowing = torch.nn.functional.one_hot(answers, num_classes).float() * KNOWN
    for name, logits, expected in (("knows", knowing, 1.0), ("guesses", torch.zeros_like(knowing), float(num_classes))):
        computed = perplexity(float(losses_of(logits, batch).sum()) / batch.total_targets)
        if abs(computed / expected - 1) > TOLERANCE:
            raise SettingsError(f"data: a model that {name} has perplexity {computed:.6g}, it should be {expected:.6g}")


def overlap(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> float:
    """Share of validation's windows, side by side, that occur anywhere in the training tokens. Windows are compared by
    a 64-bit polynomial hash."""
    if min(len(train), len(validation)) < WINDOW_TOKENS:
        return 0.0
    wanted = _hashes(validation)[::WINDOW_TOKENS]
    return float(np.isin(wanted, _hashes(train)).mean())


def _hashes(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The hash of every window, by the place where it begins."""
    count = len(tokens) - WINDOW_TOKENS + 1
    values = tokens.astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW_TOKENS):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + values[offset : offset + count] + np.uint64(1)
    return hashes


def _spread(table: TextTable, count: int) -> TokenBatch:
    """Sequences spread evenly over a split."""
    count = min(count, table.num_sequences)
    return table.batch(np.arange(count) * table.num_sequences // count)


def _of_train(splits: TextSplits, settings: Settings, count: int) -> TokenBatch:
    if splits.table is not None:
        return _spread(splits.table, count)
    (cursor,) = splits.train.deal(1, 1, settings.data.shards, settings.seed)
    try:
        return cast(TokenBatch, cursor.batch(0, 0, count, (1,)))  # of a corpus of text
    except StreamError as error:
        raise SettingsError(str(error)) from error


def _lengths(batch: TokenBatch) -> npt.NDArray[np.int64]:
    return batch.lengths.numpy() if batch.lengths is not None else np.full(len(batch), batch.tokens.shape[1])


def _tokens(batch: TokenBatch) -> npt.NDArray[np.int64]:
    """All tokens that are not padding, in a row; of neighbours that share one, it is there once."""
    rows = batch.tokens.numpy()
    if batch.lengths is None:
        return rows[:, :-1].reshape(-1)
    return np.concatenate([row[:length] for row, length in zip(rows, batch.lengths.tolist(), strict=True)])


def _table(splits: TextSplits, seen: dict[str, TokenBatch], settings: Settings) -> Table:
    columns = ("split", "sequences", "tokens", "looked at", "targets", "lengths, min to max", "padding")
    table = new_table(columns, "of the sequences that were looked at")
    totals = {"train": splits.table, "validation": splits.validation}
    for name, batch in seen.items():
        split, lengths = totals[name], _lengths(batch)
        quantiles = " ".join(f"{length:.0f}" for length in np.quantile(lengths, QUANTILES))
        width = settings.data.sequence_length + (batch.labels is None)
        table.add_row(
            name,
            f"{split.num_sequences:,}" if split else "streamed",
            f"{split.num_tokens:,}" if split else "streamed",
            f"{len(batch):,}",
            f"{batch.total_targets:,}",
            quantiles,
            f"{1 - lengths.sum() / (width * len(batch)):.1%}",
        )
    return table


def _label_table(names: Sequence[str], seen: dict[str, TokenBatch]) -> Table:
    table = new_table(("label", *seen), "labels")
    counts = {name: Counter(batch.labels.tolist()) for name, batch in seen.items() if batch.labels is not None}
    for number, label in enumerate(names):
        table.add_row(label, *(f"{counts[name][number] / len(batch):.1%}" for name, batch in seen.items()))
    return table


def _sample(batch: TokenBatch, place: int, splits: TextSplits) -> str:
    row = batch.tokens[place, : int(_lengths(batch)[place])].tolist()
    tokenizer = splits.vocabulary.tokenizer
    text = " ".join(map(str, row)) if tokenizer is None else str(tokenizer.decode(row))
    label = ""
    if splits.labels and batch.labels is not None:
        label = f"[{splits.labels[int(batch.labels[place])]}] "
    return label + repr(text[:SAMPLE_CHARACTERS])
