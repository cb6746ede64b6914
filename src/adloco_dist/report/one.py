"""The page of one run."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime

from adloco_dist.config.compose import as_typed
from adloco_dist.report import charts
from adloco_dist.report.page import Page, Section, Table
from adloco_dist.report.pool import loss_in_words, merge_tree, place_in_words
from adloco_dist.report.source import Source
from adloco_dist.report.words import sentences, tiles
from adloco_dist.run.reading import saved_candidate
from adloco_dist.run.rows import METRICS_FILE
from adloco_dist.text import in_bytes, one_line, printable, set_of_ranks

LONGEST_SAMPLE = 600
"""Characters."""
MAX_NOTES = 200
"""Rows of notes; a run may have thousands."""


def page_of(source: Source) -> Page:
    """What there is to see of a run."""
    history = source.history
    link = [charts.bytes_sent(history), charts.transfer(history), charts.resource(history, charts.RESENT)]
    resources = [charts.resource(history, chart) for chart in charts.RESOURCES]
    sections = [
        Section.of("Learning", charts.learning(history, saved_candidate(source.result)), [_sample(source)]),
        Section.of("Trainers", [merge_tree(history, source.cluster["nodes"])], [_merges(source)]),
        Section.of("Batches and rounds", charts.batches(history)),
        Section.of("Time", [charts.phases(history), charts.throughput(history), charts.utilisation(history)]),
        Section.of("Link", link, [_bytes(source), _links(source)]),
        Section.of("Processes and devices", resources, [_ranks(source)]),
        Section.of("Warnings and restarts", (), [_restarts(source), _notes(source)]),
        Section.of("Configuration", (), _configuration(source)),
    ]
    return Page(
        source.name,
        " · ".join(_subtitle(source)),
        [section for section in sections if section.figures or section.tables],
        source.problems,
        tiles(source),
        sentences(source),
    )


def _subtitle(source: Source) -> Iterator[str]:
    facts = source.facts
    yield source.state
    if "started" in facts:
        yield f"started {facts['started']}"
    if source.result is None and source.history.num_rounds:
        written = datetime.fromtimestamp((source.directory / METRICS_FILE).stat().st_mtime).astimezone()
        yield f"last record {written.isoformat(timespec='seconds')}"
    if corpus := facts.get("corpus", {}).get("source"):
        yield f"on {one_line(corpus)}"


def _sample(source: Source) -> Table:
    """What the saved model writes."""
    sample = (source.result or {}).get("sample") or []
    head = ("how validation text begins", "what the saved model writes after that")
    return Table("A sample", head, [[printable(part)[:LONGEST_SAMPLE] for part in sample]] if len(sample) == 2 else [])


def _merges(source: Source) -> Table:
    head = ("before round", "members (weight)", "became", "validation losses", "of the average", "workers", "policy")
    rows = [
        (
            f"{row.round:,}",
            ", ".join(f"{member} ({share:.4f})" for member, share in merge.shares.items()),
            str(merge.survivor),
            ", ".join(f"{member}: {loss_in_words(merge.member_losses.get(member))}" for member in merge.shares),
            loss_in_words(merge.loss),
            f"{row.workers} on {place_in_words(row.ranks, source.cluster['nodes'])}",
            merge.policy,
        )
        for row, merge in source.history.merges
    ]
    return Table("Merges", head, rows)


def _bytes(source: Source) -> Table:
    history = source.history
    kinds = {kind: float(of_rounds.sum()) for kind, of_rounds in history.bytes_sent.items()}
    total, num_rounds = sum(kinds.values()), history.num_rounds
    rows = [
        (kind, in_bytes(count), f"{count / total:.1%}", in_bytes(count / num_rounds))
        for kind, count in sorted(kinds.items(), key=lambda item: -item[1])
        if count and num_rounds
    ]
    return Table("Bytes by kind of collective", ("kind", "sent by all ranks", "share", "per round"), rows)


def _links(source: Source) -> Table:
    rows = [
        (
            " and ".join(map(str, link["nodes"])),
            f"{8 * link['bytes_per_second'] / 1e6:,.1f} Mbit/s",
            f"{1000 * link['latency_seconds']:,.2f} ms",
        )
        for link in source.cluster["links"]
    ]
    return Table("Links, measured before training", ("nodes", "each way", "round trip"), rows)


def _ranks(source: Source) -> Table:
    head = ("rank", "node", "host", "device", "cores", "memory", "torch", "driver")
    ranks = [{**rank, "memory": in_bytes(rank["memory_bytes"])} for rank in source.cluster["ranks"]]
    rows = [["" if (value := rank.get(name)) is None else str(value) for name in head] for rank in ranks]
    return Table("Ranks", head, rows, is_folded=True)


def _restarts(source: Source) -> Table:
    """Every time that the run went on with new processes, or its living ones with other nodes."""
    head = ("started", "in round", "ranks", "hosts", "lost", "new", "why", "paused", "from checkpoint")
    rows = [
        (
            str(start.get("started", "")),
            str(start.get("round", "")),
            str(start.get("world_size", "")),
            *(", ".join(dict.fromkeys(map(str, start.get(f"{which}hosts", [])))) for which in ("", "lost_", "new_")),
            one_line(str(start.get("why", ""))),
            "" if (seconds := start.get("paused_seconds")) is None else f"{seconds:.1f} s",
            str(start.get("checkpoint", "")),
        )
        for start in source.facts.get("resumed", [])
    ]
    return Table("Restarts, and nodes that came and went", head, rows)


def _notes(source: Source) -> Table:
    """Every note once, in the order of the rounds that first have it, and the workers that were left out."""
    rounds_of: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in source.history.told:
        for text in row.notes:
            rounds_of[row.trainer, text].append(row.round)
    notes = sorted((rounds[0], trainer, text, rounds[-1]) for (trainer, text), rounds in rounds_of.items())
    rows = [
        (f"{first:,}" if first == last else f"{first:,} to {last:,}", str(trainer), text)
        for first, trainer, text, last in notes
    ]
    rows += [
        (f"{row.round:,}", str(row.trainer), f"workers {set_of_ranks(row.nonfinite_workers)} not finite, left out")
        for row in source.history.told
        if row.nonfinite_workers
    ]
    if len(rows) > MAX_NOTES:
        rows[MAX_NOTES:] = [("", "", f"and {len(rows) - MAX_NOTES:,} more, in {METRICS_FILE}")]
    return Table("Notes", ("rounds", "trainer", "note"), rows)


def _configuration(source: Source) -> Iterator[Table]:
    changed = [(name, as_typed(value)) for name, value in source.changed.items()]
    yield Table("Settings that differ from the default", (), changed)
    settings = [(name, as_typed(value)) for name, value in source.settings.items()]
    yield Table("All settings", (), settings, is_folded=True)
    facts = {name: source.facts.get(name) for name in ("command", "arithmetic", "worker_lr", "parameters")}
    known = [(name.replace("_", " "), str(value)) for name, value in facts.items() if value]
    versions = [(name, str(value)) for name, value in source.facts.get("versions", {}).items()]
    code = {rank.get("code") for rank in source.cluster["ranks"]} - {None}
    versions += [("code of adloco_dist", ", ".join(sorted(map(str, code))))] if code else []
    yield Table("Command and versions", (), [*known, *versions])
