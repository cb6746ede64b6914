"""The page of one run."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from adloco_dist.report import costs, training
from adloco_dist.report.figures import drawable
from adloco_dist.report.page import Page, Section, Table
from adloco_dist.report.pool import loss_in_words, merge_tree, merges_of, place_in_words
from adloco_dist.report.source import Source
from adloco_dist.report.words import sentences, tiles
from adloco_dist.text import in_bytes, one_line, set_of_ranks

MAX_NOTES = 200
"""Rows of notes; a run may have thousands."""


def page_of(source: Source) -> Page:
    """What there is to see of a run."""
    history = source.history
    tree = merge_tree(history, source.nodes)
    sections = [
        Section("Learning", drawable(training.learning(history))),
        Section("Trainers", [tree] if tree else [], _merges(source)),
        Section("Batches and rounds", drawable(training.batches(history))),
        Section("Time", drawable(costs.time(history))),
        Section("Link", drawable(costs.link(history)), [*_bytes(source), *_links(source)]),
        Section("Processes and devices", drawable(costs.resources(history)), _ranks(source)),
        Section("Warnings and restarts", (), _events(source)),
        Section("Configuration", (), _configuration(source)),
    ]
    return Page(
        source.name, _subtitle(source), [one for one in sections if one.figures or one.tables], source.problems,
        tiles(source), sentences(source),
    )  # fmt: skip


def _subtitle(source: Source) -> str:
    facts = source.facts
    parts = [source.state, f"started {facts['started']}" if "started" in facts else ""]
    if source.result is None and source.history.num_rounds:
        written = datetime.fromtimestamp((source.directory / "metrics.jsonl").stat().st_mtime).astimezone()
        parts.append(f"last record {written.isoformat(timespec='seconds')}")
    corpus = facts.get("corpus", {}).get("source")
    parts.append(f"on {one_line(corpus)}" if corpus else "")
    return " · ".join(part for part in parts if part)


def _merges(source: Source) -> list[Table]:
    rows = [
        (
            f"{merge.before_round:,}",
            ", ".join(f"{member} ({share:.4f})" for member, share in merge.shares.items()),
            str(merge.survivor),
            ", ".join(f"{member}: {loss_in_words(merge.losses.get(member))}" for member in merge.shares),
            loss_in_words(merge.loss),
            f"{merge.workers} on {place_in_words(merge.ranks, source.nodes)}",
            merge.policy,
        )
        for merge in merges_of(source.history)
    ]
    head = ("before round", "members (weight)", "became", "validation losses", "of the average", "workers", "policy")
    return [Table("Merges", head, rows)] if rows else []


def _bytes(source: Source) -> list[Table]:
    history = source.history
    if not history.num_rounds:
        return []
    kinds = {
        kind: float(history.totals(history.values("bytes_sent", kind)).sum()) for kind in history.names("bytes_sent")
    }
    total = sum(kinds.values())
    rows = [
        (kind, in_bytes(count), f"{count / total:.1%}", in_bytes(count / history.num_rounds))
        for kind, count in sorted(kinds.items(), key=lambda item: -item[1])
        if count
    ]
    return (
        [Table("Bytes by kind of collective", ("kind", "sent by all ranks", "share", "per round"), rows)]
        if rows
        else []
    )


def _links(source: Source) -> list[Table]:
    links = source.facts.get("cluster", {}).get("links", [])
    rows = [
        (
            " and ".join(map(str, link["nodes"])),
            f"{8 * link['bytes_per_second'] / 1e6:,.1f} Mbit/s",
            f"{1000 * link['latency_seconds']:,.2f} ms",
        )
        for link in links
    ]
    return [Table("Links, measured before training", ("nodes", "each way", "latency"), rows)] if rows else []


def _ranks(source: Source) -> list[Table]:
    found = source.facts.get("cluster", {}).get("ranks", [])
    rows = [
        (
            str(rank["rank"]), str(rank["node"]), str(rank["host"]), str(rank["device"]), str(rank["cores"]),
            in_bytes(rank["memory_bytes"]), str(rank["torch"]), str(rank.get("driver") or ""),
        )
        for rank in found
    ]  # fmt: skip
    head = ("rank", "node", "host", "device", "cores", "memory", "torch", "driver")
    return [Table("Ranks", head, rows, is_folded=True)] if rows else []


def _events(source: Source) -> list[Table]:
    history = source.history
    starts = [
        (
            str(start.get("started", "")),
            str(start.get("checkpoint", "")),
            str(start.get("world_size", "")),
            ", ".join(dict.fromkeys(map(str, start.get("hosts", [])))),
            ", ".join(map(str, start.get("lost_hosts", []))),
        )
        for start in source.facts.get("resumed", [])
    ]
    events = [
        (
            f"{note.first:,}" if note.first == note.last else f"{note.first:,} to {note.last:,}",
            str(note.trainer),
            note.text,
        )
        for note in history.notes
    ]
    for name, meaning in (("nonfinite_workers", "not finite"), ("outlier_workers", "outliers")):
        events += [
            (f"{row['round']:,}", str(row["trainer"]), f"workers {set_of_ranks(row[name])} {meaning}, left out")
            for row in history.records(name)
        ]
    more = [] if len(events) <= MAX_NOTES else [("", "", f"and {len(events) - MAX_NOTES:,} more, in metrics.jsonl")]
    tables = [Table("Restarts", ("started", "from checkpoint", "ranks", "hosts", "lost"), starts)] if starts else []
    if events:
        tables.append(Table("Notes", ("rounds", "trainer", "note"), [*events[:MAX_NOTES], *more]))
    return tables


def _configuration(source: Source) -> list[Table]:
    changed = [(name, shown(value)) for name, value in source.changed.items()]
    whole = [(name, shown(value)) for name, value in source.settings.items()]
    versions = [(name, str(value)) for name, value in source.facts.get("versions", {}).items()]
    facts = {name: source.facts.get(name) for name in ("arithmetic", "script")}
    versions += [(name, str(value)) for name, value in facts.items() if value]
    tables = [
        Table("Settings that differ from the default", (), changed),
        Table("All settings", (), whole, is_folded=True),
        Table("Versions", (), versions, is_folded=True),
    ]
    return [table for table in tables if table.rows]


def shown(value: Any) -> str:
    """A setting's value, as one would write it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (
        f"[{','.join(map(shown, value))}]" if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    )
