"""What was left out of a corpus, told once for each file and cause however often the file is read."""

from dataclasses import dataclass, field


@dataclass
class _Rows:
    numbers: set[int]
    first: tuple[int, str]
    """Number and place."""
    told: int = 0
    """How many of them."""


@dataclass
class LeftOut:
    """Rows, and ends of files. Streams add to it from threads of their own."""

    _rows: dict[tuple[str, str], _Rows] = field(default_factory=dict)
    """By file and cause."""
    _rest: dict[str, str] = field(default_factory=dict)
    """What is to be told of files that cannot be read to their end, or not at all."""
    _told: set[str] = field(default_factory=set)
    """Of those, the files that were told."""

    def add_rows(self, file: str, cause: str, number: int, count: int, place: str) -> None:
        """Rows were left out, whether they were before or not.

        Args:
            cause: "that cannot be read".
            number: of the first of them in the file; `place` says where that is.
        """
        rows = self._rows.setdefault((file, cause), _Rows(set(), (number, place)))
        rows.numbers.update(range(number, number + count))
        rows.first = min(rows.first, (number, place))

    def drop_rows(self, file: str, cause: str) -> None:
        """They are not told: the whole file is."""
        self._rows.pop((file, cause), None)

    def add_rest(self, file: str, told: str) -> None:
        """All that comes after was left out; `told` says so."""
        self._rest.setdefault(file, told)

    def take(self) -> list[str]:
        """A line for everything of which there is more than at the last call."""
        lines = []
        for (file, cause), rows in list(self._rows.items()):
            count = len(rows.numbers)
            if count > rows.told:
                rows.told = count
                lines.append(f"{file}: left out {count} row(s) {cause}; the first is {rows.first[1]}")
        rest = dict(self._rest)
        lines += [told for file, told in rest.items() if file not in self._told]
        self._told.update(rest)
        return lines
