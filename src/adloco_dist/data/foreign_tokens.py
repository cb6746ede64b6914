"""Token files of other programs: what they are, and the command that makes this project's own of them."""

import json
import shlex
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MEGATRON = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Kinds of integers by the number that an index of Megatron's has for them."""
LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""Kinds of integers by the number that a file of llm.c begins with."""
LLM_C_HEADER_BYTES = 1024
LIST_COLUMNS = ("input_ids", "tokens", "token_ids")
"""What columns of token ids are called."""


def conversion(path: Path) -> tuple[str, str] | None:
    """What a file or folder of tokens is, and the command to type; None: nobody knows.

    The command writes a .npy file of unsigned integers beside it, whose name ends in .tokens.npy.
    """
    for is_it in _FOLDERS if path.is_dir() else _FILES:
        try:
            found = is_it(path)
        except Exception:  # it is none, or a damaged one
            continue
        if found is not None:
            return found
    return None


def column_conversion(file: str, file_format: str, column: str, value: Any) -> str | None:
    """How to train on a column of a file on this machine that holds no text; None: no way fits everybody.

    Args:
        value: what a row holds there.
    """
    if not Path(file).is_file():
        return None
    if isinstance(value, list) and value and isinstance(value[0], int):
        command = {"parquet": _parquet, "json": _json_lines}.get(file_format)
        return command and f"for token ids, set data=tokens, and train from what this writes: {command(file, column)}"
    if file_format != "parquet":
        return None
    start = f"import pyarrow as pa, pyarrow.parquet as pq; table = pq.read_table({file!r})"
    target = f"{file}.text.parquet"
    if isinstance(value, bytes):
        cast = f"pa.table({{'text': table[{column!r}].cast(pa.string())}})"
        command = _python(f"{start}; pq.write_table({cast}, {target!r})")
        return f"for bytes that are UTF-8, train from what this writes: {command}"
    names = [name for name, one in value.items() if isinstance(one, str)] if isinstance(value, dict) else []
    if names:
        parts = f"pa.chunked_array([part.field({names[0]!r}) for part in table[{column!r}].chunks])"
        command = _python(f"{start}; pq.write_table(pa.table({{'text': {parts}}}), {target!r})")
        return f"for its field {names[0]} (it has {', '.join(value)}), train from what this writes: {command}"
    return None


def _python(code: str) -> str:
    return f"python -c {shlex.quote(code)}"


def _saved(path: Path | str, array: str, imports: str = "numpy as np") -> str:
    """The command that saves an expression of token ids."""
    target = f"{path}.tokens.npy"
    return _python(f"import {imports}; np.save({target!r}, {array})")


def _parquet(file: Path | str, column: str) -> str:
    array = f"pq.read_table({str(file)!r}, columns=[{column!r}])[0].combine_chunks().flatten().to_numpy()"
    return _saved(file, f"{array}.astype(np.uint32)", "numpy as np, pyarrow.parquet as pq")


def _json_lines(file: Path | str, column: str) -> str:
    rows = f"[np.array(json.loads(line)[{column!r}], np.uint32) for line in open({str(file)!r})]"
    return _saved(file, f"np.concatenate({rows})", "json, numpy as np")


def _array_file(path: Path) -> tuple[str, str] | None:
    """.npy of other types or dimensions."""
    if path.suffix != ".npy":
        return None
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind not in "iu":
        return None
    kind = f"an array of {array.dtype}{list(array.shape)}"
    return kind, _saved(path, f"np.load({str(path)!r}).reshape(-1).astype(np.uint32)")


def _archive(path: Path) -> tuple[str, str] | None:
    """.npz, by its first array of integers."""
    if not zipfile.is_zipfile(path) or path.suffix != ".npz":
        return None
    with np.load(path, allow_pickle=False) as arrays:
        name = next(name for name in arrays.files if arrays[name].dtype.kind in "iu")
    return f"an archive of arrays, among them {name}", _saved(
        path, f"np.load({str(path)!r})[{name!r}].reshape(-1).astype(np.uint32)"
    )


def _llm_c(path: Path) -> tuple[str, str] | None:
    with path.open("rb") as file:
        (magic,) = struct.unpack("<i", file.read(4))
    if magic not in LLM_C:
        return None
    array = f"np.fromfile({str(path)!r}, np.{LLM_C[magic]}, offset={LLM_C_HEADER_BYTES})"
    return f"a file of llm.c's, {LLM_C[magic]} behind a header", _saved(path, array)


def _megatron(path: Path) -> tuple[str, str] | None:
    """.bin beside an .idx, or that .idx."""
    if path.suffix not in (".bin", ".idx"):
        return None
    with path.with_suffix(".idx").open("rb") as file:
        magic, _, code = struct.unpack("<9sQB", file.read(18))
    if magic != MEGATRON:
        return None
    data, kind = path.with_suffix(".bin"), MEGATRON_DTYPES[code]
    tokens = f"np.fromfile({str(data)!r}, np.{kind})"
    return f"Megatron's, {kind}", _saved(data, tokens if kind.startswith("u") else f"{tokens}.astype(np.uint32)")


def _plain_bin(path: Path) -> tuple[str, str] | None:
    """nanoGPT's, without a header."""
    if path.suffix != ".bin" or path.stat().st_size % 2:
        return None
    kind = "a file without a header, as nanoGPT writes it (of uint16; write np.uint32 if it was made with that)"
    return kind, _saved(path, f"np.fromfile({str(path)!r}, np.uint16)")


def _torch_file(path: Path) -> tuple[str, str] | None:
    if path.suffix not in (".pt", ".pth"):
        return None
    import torch

    held = torch.load(path, weights_only=True, mmap=zipfile.is_zipfile(path))
    read = f"torch.load({str(path)!r}, weights_only=True)"
    if isinstance(held, dict):
        name = next(name for name, one in held.items() if isinstance(one, torch.Tensor) and not one.is_floating_point())
        held, read = held[name], f"{read}[{name!r}]"
    is_nested = isinstance(held, list) and not isinstance(held[0], int)
    array = f"np.concatenate([np.asarray(one) for one in {read}])" if is_nested else f"np.asarray({read}).reshape(-1)"
    return "a file of torch's", _saved(path, f"{array}.astype(np.uint32)", "numpy as np, torch")


def _parquet_file(path: Path) -> tuple[str, str] | None:
    if path.suffix != ".parquet":
        return None
    from pyarrow.parquet import read_schema

    names = read_schema(path).names
    column = next((name for name in LIST_COLUMNS if name in names), None)
    if column is None:
        return "parquet", "set data=parquet, and name the column of its text with data.text_column"
    return f"parquet with a column {column}", _parquet(path, column)


def _rows_of_text(path: Path) -> tuple[str, str] | None:
    name = {".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}.get(path.suffix)
    rule = f"set data={name}, or make token files of it with launch/tokenize_corpus.py"
    return None if name is None else (f"text ({path.suffix})", rule)


def _web_dataset(path: Path) -> tuple[str, str] | None:
    import tarfile

    if path.suffix != ".tar":
        return None
    with tarfile.open(path) as archive:
        endings = {Path(member.name).suffix for member in archive if member.isfile()}
    ending = next(ending for ending in (".npy", ".txt") if ending in endings)
    start = f"import io, json, tarfile, numpy as np; archive = tarfile.open({str(path)!r})"
    held = f"[archive.extractfile(one).read() for one in archive if one.name.endswith({ending!r})]"
    if ending == ".npy":
        parts = f"[np.load(io.BytesIO(one)).reshape(-1) for one in {held}]"
        target = f"{path}.tokens.npy"
        code = f"{start}; np.save({target!r}, np.concatenate({parts}).astype(np.uint32))"
        return "an archive of arrays, as webdataset reads it", _python(code)
    lines = f"[json.dumps(dict(text=one.decode())) + chr(10) for one in {held}]"
    target = f"{path}.jsonl"
    code = f"{start}; open({target!r}, 'w').writelines({lines})"
    return "an archive of texts, as webdataset reads it (for data=json)", _python(code)


def _saved_dataset(path: Path) -> tuple[str, str] | None:
    """A folder of `Dataset.save_to_disk`."""
    features = json.loads((path / "dataset_info.json").read_text(encoding="utf-8"))["features"]
    column = next((name for name in LIST_COLUMNS if name in features), None)
    imports = "numpy as np, datasets"
    if column is None:
        target = f"{path}.parquet"
        code = f"import datasets; datasets.load_from_disk({str(path)!r}).to_parquet({target!r})"
        return "a data set of datasets (for data=parquet)", _python(code)
    array = f"datasets.load_from_disk({str(path)!r}).data.column({column!r}).combine_chunks().flatten().to_numpy()"
    return f"a data set of datasets with a column {column}", _saved(path, f"{array}.astype(np.uint32)", imports)


def _mosaic(path: Path) -> tuple[str, str] | None:
    """A folder of MosaicML's streaming, in MDS."""
    (shard, *_) = json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]
    column = next(name for name in LIST_COLUMNS if name in shard["column_names"])
    encoding = shard["column_encodings"][shard["column_names"].index(column)]
    row = f"row[{column!r}]" if encoding.startswith("ndarray") else f"np.frombuffer(row[{column!r}], np.int64)"
    rows = f"[{row} for row in streaming.LocalDataset({str(path)!r})]"
    kind = f"MosaicML's {shard['format'].upper()} with a column {column}"
    kind = kind if encoding.startswith("ndarray") else f"{kind} of bytes (of int64, as llm-foundry writes them)"
    return kind, _saved(path, f"np.concatenate({rows}).astype(np.uint32)", "numpy as np, streaming")


_FILES: tuple[Callable[[Path], tuple[str, str] | None], ...] = (
    _array_file, _archive, _megatron, _llm_c, _plain_bin, _torch_file, _parquet_file, _rows_of_text, _web_dataset,
)  # fmt: skip
_FOLDERS: tuple[Callable[[Path], tuple[str, str] | None], ...] = (_saved_dataset, _mosaic)
