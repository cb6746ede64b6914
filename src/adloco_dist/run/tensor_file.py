"""The header of a safetensors file, for those who write into its places: its library writes whole files alone."""

import json
from collections.abc import Mapping
from itertools import accumulate

import torch

DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Types of elements, as safetensors calls them."""


def header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file of these tensors, which may be on the meta device; where each starts behind them."""
    # Wide elements first: each tensor starts at a multiple of its elements' size, as a view of it must.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    ends = accumulate(tensors[name].nbytes for name in names)
    spans = {name: [end - tensors[name].nbytes, end] for name, end in zip(names, ends, strict=True)}
    entries: dict[str, object] = {
        name: {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": spans[name]}
        for name in names
    }
    content = json.dumps({"__metadata__": metadata, **entries} if metadata else entries).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content, {name: start for name, (start, _) in spans.items()}
