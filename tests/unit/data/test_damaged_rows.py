"""Files of rows as they come: damage is named where it is, costs no good row and has no traceback."""

import gzip
import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from adloco_dist.config import Corpus, Damaged, DataSettings, SettingsError
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.row_streams import RowStreams
from adloco_dist.data.streams import StreamDataset
from helpers.row_files import csv_lines, json_lines, read_rows_of, refused, row_files, write_parquet

BROKEN = {
    "a row of JSON that was cut": ("x.jsonl", [*json_lines(100), '{"id": 100, "te', *json_lines(201)[101:]], 101, 1),
    "a row of JSON that is no object": ("x.jsonl", [*json_lines(100), "[1, 2]", *json_lines(201)[101:]], 101, 1),
    "half a surrogate pair": ("x.jsonl", [*json_lines(100), '{"text": "\\ud800"}', *json_lines(201)[101:]], 101, 1),
    "a key twice": ("x.jsonl", [*json_lines(100), '{"text": "a", "text": "b"}', *json_lines(201)[101:]], 101, 1),
    "too deep": ("x.jsonl", [*json_lines(100), '{"text": ' + "[" * 100_000, *json_lines(201)[101:]], 101, 1),
    "bytes that are no UTF-8": ("x.jsonl", [*json_lines(100), '{"text": "\udcff"}', *json_lines(201)[101:]], 101, 1),
    "NUL bytes": ("x.jsonl", [*json_lines(100), "\0" * 50, *json_lines(201)[101:]], 101, 1),
    "too many fields": ("x.csv", [*csv_lines(100), "100,a,b", *csv_lines(201)[102:]], 102, 1),
    "a quote that nothing closes": ("x.csv", [*csv_lines(100), '100,"text', *csv_lines(201)[102:]], 102, 1),
    "a quote open to the end": (
        "x.csv",
        [*csv_lines(100), '100,"text', *(f"{n},text {n}" for n in range(101, 201))],
        102,
        1,
    ),
    "a quote inside a text": ("x.csv", [*csv_lines(100), '100,"te"xt"', *csv_lines(201)[102:]], 102, 1),
    "bytes that are no UTF-8, csv": ("x.csv", [*csv_lines(100), "100,\udcff", *csv_lines(201)[102:]], 102, 1),
}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("case", BROKEN)
def test_one_broken_row_costs_itself_alone(tmp_path: Path, case: str, ending: str) -> None:
    name, content, line, count = BROKEN[case]
    path = tmp_path / (name + ending)
    data = "\n".join([*content, ""]).encode(errors="surrogateescape")
    path.write_bytes(gzip.compress(data) if ending else data)
    assert f"{path} cannot be read at row 100, line {line} (" in refused(path)
    found = row_files(path)
    good = [(number, f"text {number}") for number in range(201) if number != 100]
    assert read_rows_of(found) == good
    (note,) = found.take_notes()
    assert note.startswith(
        f"data.train: {path}: left out {count} row(s) that cannot be read; the first is row 100, line"
    )
    for first in (1, 100, 101, 150, 200, 201):
        assert read_rows_of(found, first) == [row for row in good if row[0] >= first]
    assert found.take_notes() == [], "reported once, however often it is read"


def test_what_is_left_out_is_reported_in_one_line_for_each_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(line + "\n" + "broken\n" * (number % 3 == 0) for number, line in enumerate(json_lines(90))))
    found = row_files(path)
    assert [text for _, text in read_rows_of(found)] == [f"text {number}" for number in range(90)]
    (note,) = found.take_notes()
    assert "left out 30 row(s)" in note and "the first is row 1, line 2 (Expecting value at column 1)" in note


@pytest.mark.parametrize(("name", "make"), [("x.jsonl.gz", json_lines), ("x.csv.gz", csv_lines)])
def test_a_gzip_that_was_cut_keeps_all_whole_rows(tmp_path: Path, name: str, make: Any) -> None:
    path = tmp_path / name
    whole = "".join(f"{line}\n" for line in make(20_000)).encode()
    packed = gzip.compress(whole)
    path.write_bytes(packed[: len(packed) * 2 // 3])
    unpacked = bytearray()
    with gzip.open(path) as content, pytest.raises(EOFError):
        while piece := content.read1():
            unpacked += piece
    found = row_files(path)
    kept = read_rows_of(found)
    assert len(kept) == unpacked.count(b"\n") - (name == "x.csv.gz") > 10_000
    (note,) = found.take_notes()
    size = path.stat().st_size
    assert f"cannot be read after row {len(kept) - 1} (" in note and f"at byte {size} of {size}): the rest is" in note
    assert "data.damaged=skip" in refused(path) and f"after row {len(kept) - 1}" in refused(path)
    assert read_rows_of(found, len(kept) - 5) == kept[-5:]


def test_a_damaged_row_group_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, [f"text {number}" for number in range(300)], compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    begin = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[begin : begin + 40] = b"\xff" * 40
    path.write_bytes(content)
    assert f"{path} cannot be read at row 100 (row group 1: " in refused(path)
    found = row_files(path)
    assert read_rows_of(found) == [(n, f"text {n}") for n in range(300) if not 100 <= n < 200]
    (note,) = found.take_notes()
    assert "left out 100 row(s)" in note and "the first is row 100 (row group 1: " in note
    assert read_rows_of(found, 150) == [(n, f"text {n}") for n in range(200, 300)]


NOTHING = {
    "garbage.jsonl": bytes(range(256)) * 40,
    "garbage.csv": b'\x00\xff\xfe"garbage\n' * 9,
    "garbage.parquet": bytes(range(256)) * 40,
    "cut.parquet": b"PAR1 and nothing",
    "list.jsonl": json.dumps(["one", "two"]).encode(),
    "cut-array.jsonl": (b'[{"text": "one"}, {"text": "tw'),
    "pretty.jsonl": json.dumps({"text": "one"}, indent=2).encode(),
    "sixteen.jsonl": "\n".join(json_lines(5)).encode("utf-16"),
    "sixteen.csv": "\n".join(csv_lines(5)).encode("utf-16"),
    "not.jsonl.gz": b"plain text\n" * 5,
    "nul.jsonl": b"\0" * 5000,
    "huge.jsonl": b"x" * 5_000_000,
    "text.jsonl": b"a line of text\n" * 5000,
    "twice.csv": b"text,text\na,b\n",
    "quote.csv": b'id,"text\n1,a\n',
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_file_that_is_something_else_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(NOTHING[name])
    detail = refused(path)
    assert f"data.train: {path} cannot be read as " in detail and detail.endswith("; mend it, or set data.damaged=skip")
    assert len(detail) < 500 + len(str(path)) and detail.isprintable()
    found = row_files(path)
    assert read_rows_of(found) == []
    (note,) = found.take_notes()
    assert "cannot be read as" in note and note.endswith("all of it is left out")
    with pytest.raises(SettingsError, match="holds no document"):
        load_corpus(row_files(path).data)


READABLE = {
    "empty.jsonl": (b"", 0),
    "empty.csv": (b"", 0),
    "empty.parquet": (b"", 0),
    "empty.jsonl.gz": (gzip.compress(b""), 0),
    "blank.jsonl": (b"\n \n\r\n", 0),
    "header.csv": (b"id,text\n", 0),
    "bom.jsonl": (b"\xef\xbb\xbf" + "\n".join(json_lines(3)).encode(), 3),
    "bom.csv": (b"\xef\xbb\xbf" + "\n".join(["text", *(f"text {n}" for n in range(3))]).encode(), 3),
    "crlf.jsonl": ("\r\n".join(json_lines(3)).encode(), 3),
    "crlf.csv": ("\r\n".join(csv_lines(3)).encode(), 3),
    "cr.csv": ("\r".join(csv_lines(3)).encode(), 3),
    "gaps.jsonl": ("\n\n".join(["", *json_lines(3), ""]).encode(), 3),
    "gaps.csv": ("\n\n".join(["", *csv_lines(3), ""]).encode(), 3),
    "array.json": (json.dumps([json.loads(line) for line in json_lines(3)], indent=1).encode(), 3),
    "array.json.gz": (gzip.compress(json.dumps([json.loads(line) for line in json_lines(3)]).encode()), 3),
    "unnamed.csv": (b"text,,\ntext 0,b,c\ntext 1,b,\n", 2),
    "quoted.csv": (b'id,text\n0,"text 0"\n\n1,text 1\n', 2),
}


@pytest.mark.parametrize("name", READABLE)
def test_what_is_odd_but_whole_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(READABLE[name][0])
    found = row_files(path, Damaged.refuse)
    assert read_rows_of(found) == [(number, f"text {number}") for number in range(READABLE[name][1])]
    assert found.take_notes() == []


def test_streams_go_on_over_rows_that_are_left_out(tmp_path: Path) -> None:
    """Damage and nulls before, at and after the place where a stream resumes; two streams share the file."""
    path = tmp_path / "x.jsonl"
    content = json_lines(60)
    for number in (0, 7, 30, 31, 59):
        content[number] = "broken"
    content[12] = content[44] = '{"text": null}'
    path.write_text("\n".join(content))
    (tmp_path / "validation.jsonl").write_text("\n".join([*json_lines(4), "broken"]))
    data = DataSettings(
        corpus=Corpus.json, train=[str(path)], validation=[str(tmp_path / "validation.jsonl")], streaming=True,
        sequence_length=5, damaged=Damaged.skip,
    )  # fmt: skip
    splits = load_corpus(data)
    assert isinstance(splits.train, StreamDataset)
    rows = splits.train.source
    assert isinstance(rows, RowStreams)
    (note,) = splits.notes
    assert "validation.jsonl: left out 1 row(s)" in note
    rows.check_parts(2)
    (cursor,) = splits.train.deal(1, 2, data.shards, 0)
    for stream in cursor.streams:
        items = []
        for item in rows.items(stream):
            if item.next.epoch:
                break
            items.append(item)
        text = b"".join(bytes(item.tokens[:-1].astype("uint8")) for item in items)
        assert b"text 2" in text
        for place, item in enumerate(items[:-1]):
            again = rows.items(replace(stream, ordinal=place + 1, position=astuple(item.next)))
            assert next(again).tokens.tolist() == items[place + 1].tokens.tolist()
    detail = sorted(splits.train.take_notes())
    assert len(detail) == 2 and "left out 5 row(s) that cannot be read; the first is row 0, line 1" in detail[1]
    assert "left out 2 row(s) where data.text_column=text is null; the first is row 12, line 13" in detail[0]
