"""Other people's token files and columns are refused with the command that converts them, and the command works."""

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.data.tokens import TokenTable

pytestmark = pytest.mark.stranger
IDS = list(range(5, 205))


def loaded(*overrides: str) -> TextSplits:
    return load_corpus(compose(["data.sequence_length=4", *overrides]).data)


def pasted(message: str, folder: Path) -> None:
    """Run the command that a message ends with."""
    command = message[message.index("python -c ") :]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def write_llm_c(path: Path, magic: int, dtype: str) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(IDS)
    path.write_bytes(header.tobytes() + np.array(IDS, dtype).tobytes())


def write_megatron(path: Path, code: int, dtype: str) -> None:
    path.write_bytes(np.array(IDS, dtype).tobytes())
    lengths, starts = np.array([len(IDS)], np.int32), np.array([0], np.int64)
    rest = lengths.tobytes() + starts.tobytes() + np.array([0, 1], np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 1, 2) + rest)


def write_tar(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def as_npy(ids: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(ids, np.uint16))
    return file.getvalue()


def save_dataset(path: Path) -> None:
    datasets.Dataset.from_dict({"input_ids": [IDS[:70], IDS[70:]]}).save_to_disk(path)


FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "nanoGPT": ("train.bin", lambda path: np.array(IDS, np.uint16).tofile(path), "as nanoGPT writes it"),
    "llm.c": ("train.bin", lambda path: write_llm_c(path, 20240520, "uint16"), "llm.c's, uint16 behind a header"),
    "llm.c, llama": ("train.bin", lambda path: write_llm_c(path, 20240801, "uint32"), "llm.c's, uint32"),
    "Megatron": ("a_text_document.bin", lambda path: write_megatron(path, 4, "int32"), "is Megatron's, int32"),
    "Megatron, short": ("a_text_document.bin", lambda path: write_megatron(path, 8, "uint16"), "Megatron's, uint16"),
    "int64": ("x.npy", lambda path: np.save(path, np.array(IDS)), "an array of int64[200]"),
    "two dimensions": ("x.npy", lambda path: np.save(path, np.array(IDS, np.uint16).reshape(4, 50)), "uint16[4, 50]"),
    "npz": ("x.npz", lambda path: np.savez(path, loss=np.ones(2), train=np.array(IDS)), "among them train"),
    "a tensor": ("x.pt", lambda path: torch.save(torch.tensor(IDS).view(2, 100), path), "a file of torch's"),
    "a list": ("x.pt", lambda path: torch.save(IDS, path), "a file of torch's"),
    "tensors": ("x.pt", lambda path: torch.save([torch.tensor(IDS[:9]), torch.tensor(IDS[9:])], path), "torch's"),
    "a state": ("x.pth", lambda path: torch.save({"loss": torch.ones(1), "ids": torch.tensor(IDS)}, path), "torch's"),
    "parquet": (
        "x.parquet", lambda path: pq.write_table(pa.table({"input_ids": [IDS[:70], IDS[70:]]}), path),
        "parquet with a column input_ids",
    ),
    "webdataset": (
        "x.tar", lambda path: write_tar(path, {"0.npy": as_npy(IDS[:70]), "1.npy": as_npy(IDS[70:])}), "webdataset",
    ),
    "datasets": ("saved", save_dataset, "a data set of datasets with a column input_ids"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "folder"),
    [*((kind, "plain") for kind in FILES), *((kind, "with 'quotes' and $HOME") for kind in ("nanoGPT", "datasets"))],
)
def test_token_files_are_refused_with_a_command_that_works(kind: str, folder: str, tmp_path: Path) -> None:
    name, write, what = FILES[kind]
    path = tmp_path / folder / name
    path.parent.mkdir()
    write(path)
    with pytest.raises(SettingsError) as refused:
        loaded("data=tokens", f"data.train=[{path}]")
    message = str(refused.value)
    assert message.startswith(f"data.train={path}: is ") and what in message and "\n" not in message
    pasted(message, tmp_path)
    splits = loaded("data=tokens", f"data.train=[{path}.tokens.npy]")
    assert isinstance(splits.table, TokenTable) and isinstance(splits.validation, TokenTable)
    assert np.concatenate([*splits.table.parts, *splits.validation.parts]).tolist() == IDS


@pytest.mark.parametrize(
    ("name", "expected"),
    [("x.jsonl", "set data=json, or make token files"), ("x.txt", "set data=text, or make token files")],
)
def test_text_is_no_token_file(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(SettingsError, match=expected):
        loaded("data=tokens", f"data.train=[{tmp_path / name}]")


@pytest.mark.parametrize(("encoding", "read"), [("bytes", "np.frombuffer(row["), ("ndarray:uint16", "[row[")])
def test_the_shards_of_mosaic_are_named(encoding: str, read: str, tmp_path: Path) -> None:
    """Only what the message says: the command needs their library."""
    shard = {"format": "mds", "column_names": ["tokens"], "column_encodings": [encoding]}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    with pytest.raises(SettingsError, match="is MosaicML's MDS with a column tokens") as refused:
        loaded("data=tokens", f"data.train=[{tmp_path}]")
    assert "streaming.LocalDataset(" in str(refused.value) and read in str(refused.value)


def test_an_archive_of_texts_becomes_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, {"0.txt": "naïve".encode(), "0.json": b"{}", "1.txt": b"two\nlines"})
    with pytest.raises(SettingsError, match="an archive of texts") as refused:
        loaded("data=tokens", f"data.train=[{path}]")
    pasted(str(refused.value), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "x.tar.jsonl").read_text().splitlines()]
    assert rows == [{"text": "naïve"}, {"text": "two\nlines"}]


TEXTS = ["naïve text", "more text than that"] * 20


@pytest.mark.parametrize("column", ["text", "input_ids"])
@pytest.mark.parametrize("corpus", ["parquet", "json"])
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_token_ids(corpus: str, column: str, streaming: bool, tmp_path: Path) -> None:
    """Named as the text, or not named at all."""
    path = tmp_path / f"x.{corpus}"
    parts = [IDS[:70], IDS[70:]]
    if corpus == "parquet":
        pq.write_table(pa.table({"input_ids": parts}), path)
    else:
        path.write_text("".join(json.dumps({"input_ids": part}) + "\n" for part in parts))
    stream = ["data.streaming=true", f"data.validation=[{path}]"] if streaming else []
    with pytest.raises(SettingsError, match="for token ids, set data=tokens") as refused:
        loaded(f"data={corpus}", f"data.train=[{path}]", f"data.text_column={column}", *stream)
    pasted(str(refused.value), tmp_path)
    assert np.load(f"{path}.tokens.npy").tolist() == IDS


OTHERS: dict[str, tuple[pa.Array, str]] = {
    "binary": (pa.array([text.encode() for text in TEXTS], pa.binary()), "for bytes that are UTF-8"),
    "large binary": (pa.array([text.encode() for text in TEXTS], pa.large_binary()), "for bytes that are UTF-8"),
    "struct": (pa.array([{"id": 1, "body": text} for text in TEXTS]), "for its field body (it has id, body)"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_columns_of_other_types(kind: str, tmp_path: Path) -> None:
    values, expected = OTHERS[kind]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"content": values}), path)
    with pytest.raises(SettingsError) as refused:
        loaded("data=parquet", f"data.train=[{path}]", "data.text_column=content")
    assert expected in str(refused.value)
    pasted(str(refused.value), tmp_path)
    assert pq.read_table(f"{path}.text.parquet")["text"].to_pylist() == TEXTS
    assert loaded("data=parquet", f"data.train=[{path}.text.parquet]").notes == ()


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_columns_of_every_type_of_text_are_read(type_: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": pa.array(TEXTS, pa.string()).cast(type_)}), path)
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"text": TEXTS}), plain)
    assert (
        loaded("data=parquet", f"data.train=[{path}]").digest == loaded("data=parquet", f"data.train=[{plain}]").digest
    )


@pytest.mark.parametrize("value", [[{"role": "user", "content": "hi"}], 3, 0.5, True, {"ids": [1]}])
def test_what_has_no_conversion_is_refused_in_one_line(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": value}) + "\n")
    with pytest.raises(SettingsError, match=r"; it must be text$"):
        loaded("data=json", f"data.train=[{path}]")
