"""Text files that are no UTF-8, or no text: counted and named, in training and in what makes token files."""

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import files_of, load_corpus
from adloco_dist.tools.tokenize import Unit, tokenize_unit
from helpers.found_tokenizers import TEXT, of_bytes, written

pytestmark = pytest.mark.stranger
ODD: dict[str, tuple[bytes, str]] = {
    "latin-1": ("café".encode("latin-1"), "byte 0xe9 at 3"),
    "utf-16": ("café".encode("utf-16"), "byte 0xff at 0"),
    "shift-jis": ("日本".encode("shift-jis"), "byte 0x93 at 0"),
    "cut in a character": (("ab" * 1000 + "日").encode()[:-1], "byte 0xe6 at 2,000"),
    "half a surrogate pair": (b"abc\xed\xa0\x80", "byte 0xed at 3"),
}


def corpus(folder: Path, odd: bytes) -> str:
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{TEXT} {number}", encoding="utf-8")
    for name in ("07b.txt", "21b.txt"):
        (folder / name).write_bytes(odd + name.encode())
    return f"data.train=[{folder}/*.txt]"


@pytest.mark.parametrize("kind", ODD)
def test_a_file_that_is_no_utf8_is_refused_or_left_out(kind: str, tmp_path: Path) -> None:
    odd, place = ODD[kind]
    length = "data.sequence_length=8"
    overrides = [
        "data=text",
        length,
        corpus(tmp_path, odd),
        f"data.tokenizer={written(tmp_path / 'found', of_bytes())}",
    ]
    with pytest.raises(SettingsError) as refused:
        load_corpus(compose(overrides).data)
    expected = f"data.train={tmp_path}/07b.txt: is no UTF-8 ({place}); convert it (iconv -f ITS_ENCODING -t UTF-8)"
    assert str(refused.value).startswith(expected)
    settings = compose([*overrides, "data.damaged=skip"]).data
    splits = load_corpus(settings)
    note = f"data.train: left out 2 of 42 file(s) that are no UTF-8; the first is {tmp_path}/07b.txt ({place})"
    assert note in splits.notes
    assert splits.source == "40 text file(s)"

    train, _ = files_of(settings)
    files, notes, _ = tokenize_unit(tmp_path, Unit("00000", train.files), train, settings, 10**6)
    assert notes == [note]
    assert np.load(tmp_path / files[0].name).tolist() == [
        id_ for number in range(40) for id_ in of_bytes().encode(f"{TEXT} {number}").ids
    ]


@pytest.mark.parametrize("kind", ODD)
def test_without_a_tokenizer_its_bytes_are_read_and_it_is_named(kind: str, tmp_path: Path) -> None:
    odd, place = ODD[kind]
    files = ["data=text", corpus(tmp_path, odd), "data.sequence_length=8"]
    (note,) = load_corpus(compose(files).data).notes
    assert note.startswith("data.train: reads the bytes of 2 of 42 file(s) that are no UTF-8; the first is ")
    assert place in note
    (note,) = load_corpus(compose([*files, "data.damaged=skip"]).data).notes
    assert note.startswith("data.train: left out 2 of 42 file(s)")


def test_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(ODD["latin-1"][0])
    with pytest.raises(SettingsError, match=r"holds no document; .*; data.train: left out 1 of 1 file\(s\)"):
        load_corpus(compose(["data=text", f"data.train=[{tmp_path}/x.txt]", "data.damaged=skip"]).data)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.txt", TEXT)


def as_npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(5))


NOT_TEXT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gzip": (lambda path: path.write_bytes(gzip.compress(TEXT.encode())), "is compressed with gzip, not text"),
    "xz": (lambda path: path.write_bytes(lzma.compress(TEXT.encode())), "is compressed with xz, not text"),
    "bzip2": (lambda path: path.write_bytes(bz2.compress(TEXT.encode())), "is compressed with bzip2, not text"),
    "zip": (zipped, "is a zip archive, not text; unpack it"),
    "parquet": (
        lambda path: pq.write_table(pa.table({"text": [TEXT]}), path),
        "is parquet, not text; set data=parquet",
    ),
    "npy": (as_npy, "is an array of numpy, not text; set data=tokens"),
    "pdf": (lambda path: path.write_bytes(b"%PDF-1.7\n"), "is PDF, not text; extract its text"),
}


@pytest.mark.parametrize("kind", NOT_TEXT)
@pytest.mark.parametrize("damaged", ["refuse", "skip"])
def test_a_file_that_holds_no_text_is_refused(kind: str, damaged: str, tmp_path: Path) -> None:
    write, expected = NOT_TEXT[kind]
    write(tmp_path / "x.txt")
    with pytest.raises(SettingsError) as refused:
        load_corpus(compose(["data=text", f"data.train=[{tmp_path}/x.txt]", f"data.damaged={damaged}"]).data)
    assert str(refused.value).startswith(f"data.train={tmp_path}/x.txt: {expected}")
