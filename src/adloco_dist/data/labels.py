"""The classes of a labelled corpus."""

from collections.abc import Iterable
from dataclasses import dataclass

from adloco_dist.config import DataSettings, SettingsError
from adloco_dist.data.documents import Document
from adloco_dist.text import one_line


@dataclass(frozen=True)
class Labels:
    """Classes by number; run.json has their names."""

    names: tuple[str, ...]

    def number(self, document: Document, place: str) -> int:
        """The class of a document.

        Args:
            place: where it is, for reports.

        Raises:
            SettingsError: it is none of the classes.
        """
        label = document.label
        if isinstance(label, str):
            if label not in self.names:
                detail = f"{place} has label {one_line(repr(label))}, which no training document has"
                raise SettingsError(f"data.label_column: {detail}; its labels are {one_line(', '.join(self.names))}")
            return self.names.index(label)
        assert label is not None
        if not 0 <= label < len(self.names):
            rule = f"{place} has label {label}; labels go from 0 to {len(self.names) - 1}, or set more classes"
            raise SettingsError(f"data.num_labels={len(self.names)}: {rule}")
        return label


def find_labels(documents: Iterable[Document], names: list[str] | None, data: DataSettings) -> Labels:
    """The classes that a corpus' training documents have.

    Args:
        names: what the data set itself calls them.

    Raises:
        SettingsError: some are words, others numbers, or there is one alone.
    """
    if names is not None:
        return Labels(tuple(names))
    found = {document.label for document in documents}
    words = sorted(label for label in found if isinstance(label, str))
    if words and len(words) < len(found):
        raise SettingsError(f"data.label_column={data.label_column}: some labels are words, others numbers; use one")
    count = data.num_labels or (len(words) if words else 1 + max(label for label in found if isinstance(label, int)))
    if count < max(2, len(words)):
        detail = f"the training documents have {max(len(words), count)} classes"
        raise SettingsError(
            f"data.num_labels={data.num_labels}: {detail}; there must be two at least, all of them counted"
        )
    return Labels(tuple(words + [str(number) for number in range(len(words), count)]))
