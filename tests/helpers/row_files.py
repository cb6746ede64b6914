"""Files of rows that tests make, and how they are read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from adloco_dist.config import Corpus, Damaged, DataSettings, SettingsError
from adloco_dist.data.documents import RowFiles


def row_files(path: Path | str, damaged: Damaged = Damaged.skip, **more: Any) -> RowFiles:
    """One file, of the format that its name says."""
    corpus = next(corpus for corpus in (Corpus.csv, Corpus.parquet, Corpus.json) if corpus.name[:4] in Path(path).name)
    data = DataSettings(corpus=corpus, train=[str(path)], damaged=damaged, **more)
    return RowFiles("data.train", (str(Path(path)),), corpus.name, data)


def read_rows_of(found: RowFiles, first_row: int = 0) -> list[tuple[int, str]]:
    """Numbers and texts of the only file."""
    return [(document.row, str(document.text)) for document in found.of_file(found.files[0], first_row)]


def refused(path: Path, **more: Any) -> str:
    """What is reported of a file of which nothing may be left out."""
    with pytest.raises(SettingsError) as caught:
        read_rows_of(row_files(path, Damaged.refuse, **more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def json_lines(count: int) -> list[str]:
    return [json.dumps({"id": number, "text": f"text {number}"}) for number in range(count)]


def csv_lines(count: int) -> list[str]:
    return ["id,text", *(f'{number},"text {number}"' for number in range(count))]


def write_parquet(path: Path, texts: Sequence[Any], **more: Any) -> None:
    columns = {"text": pyarrow.array(texts), "id": pyarrow.array(range(len(texts)))}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100, **more)
