"""How a run's trainers merged: `launch/merges.py RUN`."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adloco_dist.config import SettingsError, as_tool
from adloco_dist.policy.evaluation import candidate_name, in_words
from adloco_dist.policy.merging import Merge
from adloco_dist.run.reading import read_run
from adloco_dist.run.records import read_records
from adloco_dist.run.rows import Record, merge_in_words, recorded_merge
from adloco_dist.terminal import show
from adloco_dist.text import set_of_ranks

GAP = 3
END = "end"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/merges.py."""
    parser = argparse.ArgumentParser(
        description="Draw how a run's trainers merged. Time runs downwards, and every trainer has a lane: {its ranks}, "
        "its workers, its total batch in the first and the last of the rounds named on the left. Where lanes join "
        "stands what every member counts for in the average.",
    )
    parser.add_argument("run", help="run directory, or its metrics.jsonl")
    options = parser.parse_args(arguments)
    with as_tool():
        show("\n".join(merge_drawing(options.run)))


def merge_drawing(source: str) -> list[str]:
    """The drawing of one run, line by line.

    Raises:
        SettingsError: no records there, or none of a round; or a run directory whose run.json is damaged.
    """
    records = read_records("RUN", source, needs=("ranks", "workers", "total_batch"))
    if not any(record["round"] for record in records):
        raise SettingsError(f"RUN={source}: holds no round; name a run that has trained")
    result = read_run(Path(source))["result"] if Path(source).is_dir() else None
    final = {candidate["name"]: in_words(candidate) for candidate in (result["candidates"] if result else [])}
    return draw_merges(records, final)


def draw_merges(records: Sequence[Record], final: Mapping[str, str]) -> list[str]:
    """The drawing of the records of a run that has trained, and below it every merge in words.

    Args:
        final: what an evaluation at the end of the run came to, in words, by the candidates' names.
    """
    stretches = _stretches(records)
    ends = {trainer: final.get(candidate_name(trainer), "unknown") for trainer in stretches[-1].end}
    columns = _columns(stretches, ends)
    lines = [_line(columns, "", {trainer: f"trainer {trainer}" for trainer in columns})]
    for stretch in stretches:
        if stretch.merges:
            lines += _merge_lines(columns, stretch)
        workers = {trainer: f"│ {stretch.workers(trainer)}" for trainer in stretch.begin}
        batches = {trainer: f"│ {stretch.batch(trainer)}" for trainer in stretch.begin}
        lines += [_line(columns, stretch.name, workers), _line(columns, "", batches)]
    lines.append(_line(columns, END, {trainer: f"▼ {detail}" for trainer, detail in ends.items()}))
    words = [merge_in_words(row) for stretch in stretches for row in stretch.begin.values() if "merge" in row]
    return [*lines, "", *(words or ["no trainers merged"])]


@dataclass(frozen=True)
class _Stretch:
    """Rounds without a merge in between."""

    first: int
    last: int
    begin: Mapping[int, Record]
    """Every trainer's row of the first round (of a later one where rows were lost), by ascending id."""
    end: Mapping[int, Record]
    """The same of the last round."""

    @property
    def name(self) -> str:
        first, last = self.first, self.last
        return f"round {first}" if first == last else f"rounds {first}-{last}"

    @property
    def merges(self) -> list[Merge]:
        """The merges before the first round."""
        return [recorded_merge(row) for row in self.begin.values() if "merge" in row]

    def workers(self, trainer: int) -> str:
        """Return in words where a trainer's workers are, and how many."""
        count = self.begin[trainer]["workers"]
        return f"{set_of_ranks(self.begin[trainer]['ranks'])} {count} worker{'s' if count > 1 else ''}"

    def batch(self, trainer: int) -> str:
        """Return in words a trainer's total batch in the first and in the last round."""
        first, last = self.begin[trainer]["total_batch"], self.end[trainer]["total_batch"]
        return f"batch {first}" if first == last else f"batch {first}-{last}"


def _stretches(records: Sequence[Record]) -> list[_Stretch]:
    rounds: dict[int, dict[int, Record]] = {}
    for record in sorted(records, key=lambda record: (record["round"], record["trainer"])):
        if record["round"]:
            rounds.setdefault(record["round"], {})[record["trainer"]] = record
    merging = [number for number, rows in rounds.items() if any("merge" in row for row in rows.values())]
    begins = sorted({min(rounds), *merging})
    return [_stretch(rounds, begin, end) for begin, end in zip(begins, [*begins[1:], max(rounds) + 1], strict=True)]


def _stretch(rounds: Mapping[int, Mapping[int, Record]], begin: int, end: int) -> _Stretch:
    """The rounds from `begin` on, up to the one before `end`."""
    numbers = [number for number in rounds if begin <= number < end]
    firsts: dict[int, Record] = {}
    lasts: dict[int, Record] = {}
    for number in numbers:
        for trainer, row in rounds[number].items():
            firsts.setdefault(trainer, row)
            lasts[trainer] = row
    return _Stretch(begin, numbers[-1], dict(sorted(firsts.items())), dict(sorted(lasts.items())))


def _columns(stretches: Sequence[_Stretch], ends: Mapping[int, str]) -> dict[int, int]:
    """Where on a line every trainer's column begins, left to right by id; each is as wide as what stands in it."""
    columns: dict[int, int] = {}
    column = max(map(len, (END, *(stretch.name for stretch in stretches)))) + GAP
    for trainer in sorted({trainer for stretch in stretches for trainer in stretch.begin}):
        columns[trainer] = column
        lived = [stretch for stretch in stretches if trainer in stretch.begin]
        shown = [text for stretch in lived for text in (stretch.workers(trainer), stretch.batch(trainer))]
        texts = [ends.get(trainer, ""), *shown]
        column += len("│ ") + max(map(len, texts)) + GAP
    return columns


def _line(columns: Mapping[int, int], name: str, texts: Mapping[int, str]) -> str:
    """`name`, and each text in its trainer's column."""
    line = name
    for trainer, column in columns.items():
        if trainer in texts:
            line = line.ljust(column) + texts[trainer]
    return line


def _merge_lines(columns: Mapping[int, int], stretch: _Stretch) -> list[str]:
    """The merges before a stretch, one after the other."""
    ended = {trainer for merge in stretch.merges for trainer in merge.ended}
    slots = dict.fromkeys({*stretch.begin, *ended}, "│")
    lines = [_line(columns, "", slots)]
    for merge in stretch.merges:
        shares = {member: f"│ {share:.2f}" if share else "│ left out" for member, share in merge.shares.items()}
        lines += [_line(columns, "", slots | shares), _joint(columns, slots, merge)]
        slots = {trainer: slot for trainer, slot in slots.items() if trainer not in merge.ended}
        lines.append(_line(columns, "", slots))
    return lines


def _joint(columns: Mapping[int, int], living: Collection[int], merge: Merge) -> str:
    """The line in which columns end: they turn towards the survivor's, and cross those of others on the way."""
    first, last = min(merge.shares), max(merge.shares)
    line = ""
    for trainer, column in columns.items():
        is_inside = first < trainer <= last
        line = line.ljust(column, "─" if is_inside else " ")
        if trainer == merge.survivor:
            line = (line[:-1] + "►" if is_inside else line) + ("│◄" if trainer < last else "│")
        elif trainer in merge.shares:
            line += "╰" if trainer == first else "╯" if trainer == last else "┴"
        elif trainer in living:
            line += "┼" if is_inside else "│"
    return line.rstrip()
