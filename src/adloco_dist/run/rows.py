"""The rows of metrics.jsonl: one for each trainer and round. Whoever writes or reads records does it through this."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, TypeGuard

import msgspec
from msgspec import Meta, Struct

from adloco_dist.messages import decode, decode_json, encode, strict_json
from adloco_dist.policy.merging import Merge, TrainerView
from adloco_dist.text import set_of_ranks

METRICS_FILE = "metrics.jsonl"
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Number = float | None
"""None: not finite, or not known."""


class TrainerRow(Struct, omit_defaults=True, gc=False):
    """What a trainer did in a round, or where it stood before the first (round 0).

    Fields at their defaults are left out of the file. Integer keys of dictionaries are ranks.
    """

    round: Count
    trainer: Count
    elapsed_seconds: float | None = None
    """Seconds since the first round began."""
    ranks: list[Count] = []
    workers: Count | None = None
    cursor: Count | None = None
    """Sequences that the trainer has taken from its shard."""
    plan: str | None = None
    """Digest of the round's plan."""
    updates: Count | None = None
    """H."""
    delay_updates: Count | None = None
    in_four_bits: bool = False
    """Whether 4 bits of each element travelled, with wire.format=adaptive, and not its sign alone."""
    learning_rate: Number = None
    """Of the last update that its workers take in the round; with Muon, of the matrices."""
    worker_updates: list[Count] = []
    sequences: Count | None = None
    tokens: Count | None = None
    targets: Count | None = None
    data_seconds: float | None = None
    """Time until batches were there, on the slowest rank."""
    resources: dict[Count, dict[str, Number]] = {}
    """What each rank used (cluster/monitor.py)."""
    pool_tokens: Count | None = None
    """Tokens of the whole pool since the beginning."""
    total_batch: Count | None = None
    local_batch: Count | None = None
    request: Number = None
    """Total batch that was asked for; None: any."""
    bounded_request: Number = None
    bound: str | None = None
    """What bounded the request."""
    mode: str | None = None
    batch_limit: Count | None = None
    switch_n: Number = None
    worth: Number = None
    """Progress per second over that of one worker alone, at most."""
    micro_batch: Count | None = None
    passes: Count | None = None
    """Micro-batches of an update."""
    notes: list[str] = []
    train_loss: Number = None
    finite_workers: Count | None = None
    nonfinite_workers: list[Count] = []
    pseudo_gradient_norm: Number = None
    step_losses: list[Number] = []
    validation_loss: Number = None
    validation_perplexity: Number = None
    validation_accuracy: Number = None
    seconds: dict[str, float] = {}
    """Wall time of the slowest rank, by step."""
    utilisation: dict[Count, float] = {}
    """Share of each rank's round in which updates were computed."""
    rank_seconds: dict[Count, dict[str, float]] = {}
    """Wall time of each rank, by step; `wait` is a part of `outer`, and `transfer` went on beside other steps."""
    bytes_sent: dict[str, Count] = {}
    """By kind of collective."""
    merge: Merge | None = None
    """The merge before the round in which the trainer took in others."""
    statistics: dict[str, Number | bool] | None = None
    """What was measured of its gradients in the round."""
    shared_squared_norm: Number = None
    """Mean inner product of the gradients of two workers that stand apart. What it is less than their own squared norm,
    which `statistics` has, is drift."""
    smoothed: dict[str, Number | bool] | None = None
    """The running averages from which the next request was computed."""
    noise_scale: Number = None

    def __post_init__(self) -> None:
        if (merge := self.merge) and (
            merge.survivor not in merge.shares
            or merge.shares.keys() != merge.candidates.keys()
            or not all(0 <= share <= 1 for share in merge.shares.values())
        ):
            raise ValueError("merge: names other trainers in its shares than in its candidates, or has no such shares")

    @property
    def evaluation(self) -> dict[str, float]:
        """The figures of the evaluation at the end of the round; empty: there was none."""
        names = ("validation_loss", "validation_perplexity", "validation_accuracy")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def encode_rows(rows: Sequence[TrainerRow]) -> bytes:
    """The lines of some rows."""
    return b"".join(json.dumps(strict_json(encode(row))).encode() + b"\n" for row in rows)


_decode_row = msgspec.json.Decoder(TrainerRow).decode


def parse_rows(content: bytes, first_line: int = 1) -> tuple[list[TrainerRow], list[str]]:
    """The rows of whole lines, of this version or an earlier one, and what is wrong with each line that is no row; the
    first is number `first_line` of its file."""
    rows: list[TrainerRow] = []
    problems: list[str] = []
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, start=first_line):
        try:
            rows.append(_decode_row(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            try:
                rows.append(_unusual_row(line))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    return rows, problems


def _unusual_row(line: bytes) -> TrainerRow:
    """A row with null for an infinite request in a merge, or with numbers that JSON does not know; raises a ValueError
    if it is no row."""
    value = decode_json(line)
    with suppress(AttributeError, LookupError, TypeError):  # without a merge, or with something else in its place
        for candidate in value["merge"]["candidates"].values():
            if candidate["request"] is None:
                candidate["request"] = math.inf
    return decode(TrainerRow, value)


def merge_in_words(row: TrainerRow) -> str:
    """The merge before a survivor's round."""
    merge, ranks = row.merge, row.ranks
    assert merge
    ended = [
        f"{member} ({_asked(merge.candidates[member])})" if merge.shares[member] else f"{member} (left out: not finite)"
        for member in merge.ended
    ]
    parts = [
        f"before round {row.round}: trainer{'s' if len(ended) > 1 else ''} {', '.join(ended)} into "
        f"{merge.survivor} ({_asked(merge.candidates[merge.survivor])}), {merge.policy}",
        f"ranks {set_of_ranks(ranks)} now average together" if len(ranks) > 1 else f"all on rank {ranks[0]}",
    ]
    if merge.loss is not None:
        losses = [f"{member} {loss:.4f}" for member, loss in merge.member_losses.items() if is_known(loss)]
        parts.append(f"validation losses {', '.join(losses)}, of their average {merge.loss:.4f}")
    return "; ".join(parts)


def nonfinite_in_words(row: TrainerRow) -> str:
    """The workers that were left out of a trainer's outer step."""
    nonfinite = row.nonfinite_workers
    left_out = f"worker{'s' if len(nonfinite) > 1 else ''} {', '.join(map(str, nonfinite))} not finite, left out"
    rest = f"{row.finite_workers} of {row.workers} averaged" if row.finite_workers else "no outer step"
    return f"round {row.round}, trainer {row.trainer}: {left_out}; {rest}"


def is_known(value: Number) -> TypeGuard[float]:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def _asked(view: TrainerView) -> str:
    """A request, and what the bounds made of it, which is what the trainer counts for."""
    request = f"asked for {view.request:,.4g}" if view.request < math.inf else "asked for any batch"
    return request if view.bounded == view.request else f"{request}, bounded to {view.bounded:,.4g}"
