"""Token files of other programs: what they are, and the command that converts them."""

import json
import shlex
import struct
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

MEGATRON = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Integer types by their number in an index of Megatron's."""
LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""Integer types by the first number of a file of llm.c."""
LLM_C_HEADER_BYTES = 1024
LIST_COLUMNS = ("input_ids", "tokens", "token_ids")
"""Names of columns of token ids."""
TEXT = {".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}
"""Corpora by the names of their files."""

Found = tuple[str, str]
"""What a file or folder is, and what to do with it: a command to type, or settings."""


def conversion(path: Path) -> Found | None:
    """What a file or folder of tokens is, and the command to type; None: unknown. The command writes a .npy file of
    unsigned integers beside it, whose name ends in .tokens.npy."""
    try:
        return _known_folder(path) if path.is_dir() else _known_file(path)
    except Exception:  # it is damaged, or something else
        return None


def column_conversion(file: str, file_format: str, column: str, value: Any) -> str | None:
    """How to train on a column of a local file whose rows hold such a value instead of text; None: unknown."""
    is_parquet = file_format == "parquet"
    if not Path(file).is_file() or file_format not in ("parquet", "json"):
        return None
    if isinstance(value, list) and value and isinstance(value[0], int):
        rows = f"[json.loads(line)[{column!r}] for line in open({file!r})]"
        command = _ids_of_parquet(file, column) if is_parquet else _saved(file, f"np.concatenate({rows})", "json")
        return f"for token ids, set data=tokens, and train from what this writes: {command}"
    fields = value if isinstance(value, dict) else {}
    names = [name for name, content in fields.items() if isinstance(content, str)]
    if not is_parquet or not (names or isinstance(value, bytes)):
        return None
    if names:
        kind = f"its field {names[0]} (it has {', '.join(fields)})"
        texts = f"pa.chunked_array([part.field({names[0]!r}) for part in table[{column!r}].chunks])"
    else:
        kind, texts = "bytes that are UTF-8", f"table[{column!r}].cast(pa.string())"
    start = f"import pyarrow as pa, pyarrow.parquet as pq; table = pq.read_table({file!r})"
    command = _python(f"{start}; pq.write_table(pa.table({{'text': {texts}}}), {f'{file}.text.parquet'!r})")
    return f"for {kind}, train from what this writes: {command}"


def _python(code: str) -> str:
    return f"python -c {shlex.quote(code)}"


def _saved(path: Path | str, ids: str, module: str = "") -> str:
    """The command that saves an expression of token ids, which may need a module."""
    imports = f"numpy as np, {module}" if module else "numpy as np"
    return _python(f"import {imports}; np.save({f'{path}.tokens.npy'!r}, {ids}.astype(np.uint32))")


def _ids_of_parquet(file: Path | str, column: str) -> str:
    ids = f"pq.read_table({str(file)!r}, columns=[{column!r}])[0].combine_chunks().flatten().to_numpy()"
    return _saved(file, ids, "pyarrow.parquet as pq")


def _first_of_ids(names: Iterable[str]) -> str | None:
    """The first column of token ids."""
    return next((name for name in LIST_COLUMNS if name in names), None)


def _known_file(path: Path) -> Found | None:
    """What a file is, by its ending and what is in it; raises exceptions of many kinds where it is something else."""
    name, ending = repr(str(path)), path.suffix
    if ending == ".npy":  # of other types or dimensions
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        assert array.dtype.kind in "iu"
        return f"an array of {array.dtype}{list(array.shape)}", _saved(path, f"np.load({name}).reshape(-1)")
    if ending == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            key = next(key for key in arrays.files if arrays[key].dtype.kind in "iu")
        return f"an archive of arrays, among them {key}", _saved(path, f"np.load({name})[{key!r}].reshape(-1)")
    if ending in (".bin", ".idx"):
        return _binary(path)
    if ending in (".pt", ".pth"):
        return _torch_file(path)
    if ending == ".parquet":
        from pyarrow.parquet import read_schema

        column = _first_of_ids(read_schema(path).names)
        if column is None:
            return "parquet", "set data=parquet, and name the column of its text with data.text_column"
        return f"parquet with a column {column}", _ids_of_parquet(path, column)
    if ending == ".tar":
        return _web_dataset(path)
    rule = f"set data={TEXT[ending]}, or make token files of it with launch/tokenize_corpus.py"
    return f"text ({ending})", rule


def _binary(path: Path) -> Found:
    """Megatron's .bin beside an .idx, llm.c's with a header, or nanoGPT's without one."""
    data, index = path.with_suffix(".bin"), path.with_suffix(".idx")
    start = index.read_bytes()[:18] if index.exists() else b""
    if start.startswith(MEGATRON):
        _, _, code = struct.unpack("<9sQB", start)
        kind = MEGATRON_DTYPES[code]
        return f"Megatron's, {kind}", _saved(data, f"np.fromfile({str(data)!r}, np.{kind})")
    with data.open("rb") as file:
        (magic,) = struct.unpack("<i", file.read(4))
    if magic in LLM_C:
        kind = LLM_C[magic]
        ids = f"np.fromfile({str(data)!r}, np.{kind}, offset={LLM_C_HEADER_BYTES})"
        return f"a file of llm.c's, {kind} behind a header", _saved(data, ids)
    assert data.stat().st_size % 2 == 0
    what = "a file without a header, as nanoGPT writes it (of uint16; write np.uint32 if it was made with that)"
    return what, _saved(data, f"np.fromfile({str(data)!r}, np.uint16)")


def _torch_file(path: Path) -> Found:
    import torch

    held = torch.load(path, weights_only=True, mmap=zipfile.is_zipfile(path))
    read = f"torch.load({str(path)!r}, weights_only=True)"
    if isinstance(held, dict):
        tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        name = next(name for name, value in tensors.items() if not value.is_floating_point())
        held, read = held[name], f"{read}[{name!r}]"
    is_nested = isinstance(held, list) and not isinstance(held[0], int)
    ids = f"np.concatenate([np.asarray(ids) for ids in {read}])" if is_nested else f"np.asarray({read}).reshape(-1)"
    return "a file of torch's", _saved(path, ids, "torch")


def _web_dataset(path: Path) -> Found:
    with tarfile.open(path) as archive:
        endings = {Path(member.name).suffix for member in archive if member.isfile()}
    ending = next(ending for ending in (".npy", ".txt") if ending in endings)
    held = (
        f"(tar.extractfile(one) for tar in [tarfile.open({str(path)!r})] for one in tar if one.name[-4:] == {ending!r})"
    )
    if ending == ".npy":
        ids = f"np.concatenate([np.load(io.BytesIO(file.read())).reshape(-1) for file in {held}])"
        return "an archive of arrays, as webdataset reads it", _saved(path, ids, "io, tarfile")
    lines = f"[json.dumps(dict(text=file.read().decode())) + chr(10) for file in {held}]"
    command = _python(f"import json, tarfile; open({f'{path}.jsonl'!r}, 'w').writelines({lines})")
    return "an archive of texts, as webdataset reads it (for data=json)", command


def _known_folder(path: Path) -> Found:
    """What `Dataset.save_to_disk` wrote, or MosaicML's streaming in MDS (arrays, or bytes of int64)."""
    name = repr(str(path))
    if (path / "dataset_info.json").exists():
        features = json.loads((path / "dataset_info.json").read_text(encoding="utf-8"))["features"]
        column, read = _first_of_ids(features), f"datasets.load_from_disk({name})"
        if column is None:
            command = _python(f"import datasets; {read}.to_parquet({f'{path}.parquet'!r})")
            return "a data set of datasets (for data=parquet)", command
        ids = f"{read}.data.column({column!r}).combine_chunks().flatten().to_numpy()"
        return f"a data set of datasets with a column {column}", _saved(path, ids, "datasets")
    (shard, *_) = json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]
    encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    column = next(name for name in LIST_COLUMNS if name in encodings)
    is_array = encodings[column].startswith("ndarray")
    row = f"row[{column!r}]" if is_array else f"np.frombuffer(row[{column!r}], np.int64)"
    ids = f"np.concatenate([{row} for row in streaming.LocalDataset({name})])"
    return f"MosaicML's {shard['format'].upper()} with a column {column}", _saved(path, ids, "streaming")
