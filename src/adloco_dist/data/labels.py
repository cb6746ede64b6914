"""The classes of a labelled corpus."""

from collections.abc import Iterable
from dataclasses import dataclass

from adloco_dist.config import DataSettings, SettingsError, require
from adloco_dist.data.documents import Document
from adloco_dist.text import one_line


@dataclass(frozen=True)
class Labels:
    """Classes by number; run.json has their names."""

    names: tuple[str, ...]

    def number(self, document: Document) -> int:
        """The class of a document; raises a SettingsError where it is none of the classes."""
        label, count, place = document.label, len(self.names), f"row {document.row} of {document.file}"
        assert label is not None
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, str):
            detail = f"{place} has label {one_line(repr(label))}, which no training document has"
            raise SettingsError(f"data.label_column: {detail}; its labels are {one_line(', '.join(self.names))}")
        rule = f"{place} has label {label}; labels go from 0 to {count - 1}, or set more classes"
        require(0 <= label < count, "data.num_labels", count, rule)
        return label


def find_labels(documents: Iterable[Document], names: list[str] | None, data: DataSettings) -> Labels:
    """The classes that a corpus' training documents have, or that it names itself; raises a SettingsError where some
    are words, others numbers, or there is one alone."""
    if names is not None:
        return Labels(tuple(names))
    labels = {document.label for document in documents}
    words = sorted(label for label in labels if isinstance(label, str))
    is_of_one_kind = not words or len(words) == len(labels)
    rule = "some labels are words, others numbers; use one kind"
    require(is_of_one_kind, "data.label_column", data.label_column, rule)
    count = data.num_labels or (len(words) if words else 1 + max(label for label in labels if isinstance(label, int)))
    has = f"the training documents have {max(len(words), count)} classes"
    rule = f"{has}; there must be two at least, all of them counted"
    require(count >= max(2, len(words)), "data.num_labels", data.num_labels, rule)
    return Labels(tuple(words + [str(number) for number in range(len(words), count)]))
