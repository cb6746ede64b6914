"""Files of rows by any name, from anywhere, and what stands in them: nulls, values, columns."""

import gzip
import json
import os
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest

from adloco_dist.config import Corpus, Damaged, DataSettings, SettingsError
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.documents import RowFiles
from adloco_dist.data.files import expand
from helpers.row_files import csv_lines, json_lines, read_rows_of, refused, row_files, write_parquet


def test_line_ends_and_commas_inside_quotes_belong_to_the_text(tmp_path: Path) -> None:
    path, long = tmp_path / "x.csv", 'word, "quoted" \r\n' * 20_000  # longer than the csv module takes by itself
    path.write_text('id,text\n0,"' + long.replace('"', '""') + '"\n1,b,c\n', encoding="utf-8", newline="")
    found = row_files(path)
    assert read_rows_of(found) == [(0, long)]
    assert "row 1, line 20003" in found.take_notes()[0]


def test_values_of_csv_are_what_stands_there(tmp_path: Path) -> None:
    """No word of a text is taken for null, none for a number; labels that are numbers are numbers."""
    path = tmp_path / "x.csv"
    path.write_text("text,label\n007,1\nNaN,0\nNA,01\n")
    found = row_files(path, Damaged.refuse, label_column="label")
    assert [(document.text, document.label) for document in found.documents()] == [("007", 1), ("NaN", 0), ("NA", 1)]


NULLS = {
    "null.jsonl": ['{"text": "a", "label": 0}', '{"text": null, "label": 0}', '{"text": "b", "label": 1}'],
    "nan.jsonl": ['{"text": "a", "label": 0}', '{"text": NaN, "label": 0}', '{"text": "b", "label": 1}'],
    "label.jsonl": ['{"text": "a", "label": 0}', '{"text": "x", "label": null}', '{"text": "b", "label": 1}'],
    "lacks.jsonl": ['{"text": "a", "label": 0}', '{"label": 0}', '{"text": "b", "label": 1}'],
    "few.csv": ["label,text", "0,a", "0", "1,b"],
    "field.csv": ["text,label", "a,0", ",0", "b,1"],
    "label.csv": ["text,label", "a,0", "x,", "b,1"],
}


@pytest.mark.parametrize("name", NULLS)
def test_a_null_is_reported_and_left_out_if_asked(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("\n".join(NULLS[name]))
    detail, line = refused(path, label_column="label"), 2 + path.name.endswith("csv")
    column = "label_column=label" if name.startswith("label") else "text_column=text"
    what = "has no such column; it has label" if name == "lacks.jsonl" else "is null"
    assert detail.startswith(f"data.{column}: row 1, line {line} of {path} {what}") and "data.damaged=skip" in detail
    found = row_files(path, label_column="label")
    assert [(d.row, d.text, d.label) for d in found.documents()] == [(0, "a", 0), (2, "b", 1)]
    (note,) = found.take_notes()
    assert note == f"data.train: {path}: left out 1 row(s) where data.{column} is null; the first is row 1, line {line}"
    assert read_rows_of(found, 1) == read_rows_of(found, 2) == [(2, "b")]


def test_nulls_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, ["a", None, "b"])
    assert f"data.text_column=text: row 1 of {path} is null" in refused(path)
    assert read_rows_of(row_files(path)) == [(0, "a"), (2, "b")]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
def test_a_column_that_no_row_has_is_a_mistake_even_where_nulls_are_skipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        write_parquet(path, ["a", "b"])
    else:
        path.write_text("\n".join((json_lines if name == "x.jsonl" else csv_lines)(9)))
    with pytest.raises(
        SettingsError, match=r"data\.text_column=body: .* has no such column; it has (id|text), (id|text)"
    ):
        read_rows_of(row_files(path, text_column="body"))
    assert "has no such column" in refused(path, text_column="body")


@pytest.mark.parametrize(
    ("value", "kind"), [(5, "a number"), (True, "true or false"), (["a"], "a list"), ({"a": 1}, "an object")]
)
def test_what_is_no_text_is_named(tmp_path: Path, value: object, kind: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([*json_lines(3), json.dumps({"text": value})]))
    assert refused(path) == f"data.text_column=text: row 3, line 4 of {path} holds {kind}; it must be text"


ODD_NAMES = ["a[1]", "what?", "all*", "ü ä", "it's=b", "a::b", "x:, {y}", "~", "#1", "-m"]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet", ".txt"])
def test_files_with_odd_names(tmp_path: Path, name: str, ending: str) -> None:
    """Found by their name, and by a glob; not taken for a glob, a chain of files or a URL."""
    path = tmp_path / (name + ending)
    (tmp_path / ("a1" + ending)).write_bytes(b"another")
    if ending == ".parquet":
        write_parquet(path, [f"text {number}" for number in range(9)])
    else:
        content = "\n".join((csv_lines if "csv" in ending else json_lines)(9)).encode()
        path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    assert expand("data.train", [str(path)]) == [path]
    assert path in expand("data.train", [str(tmp_path / "*")])
    corpus = {".jsonl": Corpus.json, ".csv": Corpus.csv, ".parquet": Corpus.parquet, ".txt": Corpus.text}
    data = DataSettings(corpus=corpus["." + ending.split(".")[1]], train=[str(path)], sequence_length=4)
    splits = load_corpus(data)
    assert splits.table is not None and splits.table.batch(np.arange(1))


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    for name, word in (
        ("pipe.jsonl", "not a file but a pipe"),
        ("folder.jsonl", "is not a file"),
        ("link.jsonl", "link to what is not there"),
        ("gone.jsonl", "no such file"),
        ("x" * 5000, "no such file"),
    ):
        with pytest.raises(SettingsError, match=word) as caught:
            expand("data.train", [str(tmp_path / name)])
        assert "\n" not in str(caught.value)
    for name in ("pipe.jsonl", "folder.jsonl", "link.jsonl", "gone.jsonl"):  # as if it had changed after it was found
        with pytest.raises(SettingsError, match=rf"data\.train: .*{name} (is not a file|cannot be opened)"):
            read_rows_of(row_files(tmp_path / name))
    with pytest.raises(SettingsError, match="link to what is not there"):
        expand("data.train", [str(tmp_path / "*.jsonl")])


@pytest.mark.needs("user")
def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json_lines(3)))
    path.chmod(0)
    with pytest.raises(SettingsError, match="cannot be opened"):
        read_rows_of(row_files(path))


def test_a_corpus_without_rows_leaves_none_out() -> None:
    with pytest.raises(SettingsError, match=r"data\.damaged=skip: needs rows"):
        DataSettings(damaged=Damaged.skip)


@pytest.mark.parametrize(("ending", "codec"), [(".gz", "gzip"), (".bz2", "bz2"), (".zst", "zstd"), (".lz4", "lz4")])
@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
def test_compressed_files(tmp_path: Path, name: str, ending: str, codec: str) -> None:
    plain, path = tmp_path / name, tmp_path / (name + ending)
    if name == "x.parquet":
        write_parquet(plain, [f"text {number}" for number in range(300)])
    else:
        plain.write_text("\n".join((json_lines if name == "x.jsonl" else csv_lines)(300)))
    with pyarrow.output_stream(str(path), compression=codec) as packed:
        packed.write(plain.read_bytes())
    for first in (0, 250):
        found = read_rows_of(row_files(path, Damaged.refuse), first)
        assert found == read_rows_of(row_files(plain), first) == [(n, f"text {n}") for n in range(first, 300)]
    path.write_bytes(path.read_bytes()[:-20])
    size = path.stat().st_size
    assert f"at byte {size} of {size}" in refused(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.csv", "x.parquet"])
def test_files_with_an_address(tmp_path: Path, name: str) -> None:
    """As those of the hub are read, through fsspec."""
    path = tmp_path / name
    if name == "x.parquet":
        write_parquet(path, [f"text {number}" for number in range(300)])
    else:
        content = "\n".join((csv_lines if name == "x.csv" else json_lines)(300)).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{name}", path.read_bytes())
    address = f"memory://{tmp_path.name}"
    data = row_files(path, Damaged.refuse).data
    found = RowFiles("data.train", (f"{address}/{name}",), data.corpus.name, data)
    assert read_rows_of(found) == [(number, f"text {number}") for number in range(300)]
    gone = RowFiles("data.train", (f"{address}/gone-{name}",), data.corpus.name, data)
    with pytest.raises(SettingsError, match=rf"data\.train: {address}/gone-{name} cannot be opened"):
        read_rows_of(gone)
