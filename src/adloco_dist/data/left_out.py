"""What was left out of a corpus, reported once for each file and cause however often the file is read."""

from dataclasses import dataclass, field


@dataclass
class _Rows:
    numbers: set[int]
    first: tuple[int, str]
    """Number and place of the first of them."""
    detail: int = 0
    """How many of them were reported."""


@dataclass
class LeftOut:
    """Rows, and ends of files. Streams add to it from threads of their own."""

    _rows: dict[tuple[str, str], _Rows] = field(default_factory=dict)
    """Rows that were left out, by file and cause."""
    _rest: dict[str, str] = field(default_factory=dict)
    """What is to be reported of files that cannot be read to their end, or not at all."""
    _reported: set[str] = field(default_factory=set)
    """The files in `_rest` that were reported."""

    def add_rows(self, file: str, cause: str, number: int, count: int, place: str) -> None:
        """Note that rows were left out, whether or not they were noted before.

        Args:
            cause: "that cannot be read".
            number: number of the first of them in the file; `place` says where that is.
        """
        rows = self._rows.setdefault((file, cause), _Rows(set(), (number, place)))
        rows.numbers.update(range(number, number + count))
        rows.first = min(rows.first, (number, place))

    def drop_rows(self, file: str, cause: str) -> None:
        """Forget a file's rows, because the whole file is reported."""
        self._rows.pop((file, cause), None)

    def add_rest(self, file: str, detail: str) -> None:
        """Note that the rest of a file was left out, which `detail` says."""
        self._rest.setdefault(file, detail)

    def take(self) -> list[str]:
        """A line for everything of which there is more than at the last call."""
        lines = []
        for (file, cause), rows in list(self._rows.items()):
            count = len(rows.numbers)
            if count > rows.detail:
                rows.detail = count
                lines.append(f"{file}: left out {count} row(s) {cause}; the first is {rows.first[1]}")
        rest = dict(self._rest)
        lines += [detail for file, detail in rest.items() if file not in self._reported]
        self._reported.update(rest)
        return lines
