"""Which of a module's parameters are matrices between its input and its output, which Muon updates."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

HEADS = re.compile(r"((q|k|v|qkv)_proj|query|key|value|query_key_value|W?qkv)[._]weight|in_proj_weight")
"""Projections, by their names in an attention module, whose rows are those of one head after the other."""
MAX_KINDS = 12
"""Names that the first lines of a run have of each optimizer."""


@dataclass(frozen=True)
class Matrices:
    """A parameter as a stack of matrices."""

    shape: tuple[int, ...]
    """Of the parameter, of which ranks may have parts."""
    stack: tuple[int, int, int]
    """(count, rows, columns)."""

    @classmethod
    def of(cls, shape: tuple[int, ...], is_convolution: bool, head_rows: int | None = None) -> "Matrices | None":
        """A convolution's kernels side by side are one matrix, with a row for each of dimension 0; of what has heads
        the rows of each are one; of other shapes the last two dimensions are. None: there is none of two rows and two
        columns."""
        stacked = (1, shape[0], math.prod(shape[1:])) if is_convolution else (math.prod(shape[:-2]), *shape[-2:])
        if head_rows and len(shape) == 2 and shape[0] % head_rows == 0:
            stacked = (shape[0] // head_rows, head_rows, shape[1])
        return cls(shape, stacked) if len(stacked) == 3 and min(stacked[1:]) > 1 else None

    @property
    def is_by_head(self) -> bool:
        return len(self.shape) == 2 and self.stack[0] > 1

    @property
    def width(self) -> int:
        """The smaller dimension of one matrix, or of all heads together."""
        return min(self.shape if self.is_by_head else self.stack[1:])


def mean_width(hidden: Collection[Matrices]) -> float:
    """The mean width of matrices, by their elements."""
    elements = [math.prod(matrices.shape) for matrices in hidden]
    return sum(n * matrices.width for n, matrices in zip(elements, hidden, strict=True)) / sum(elements)


def hidden_matrices(module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Matrices]:
    """The matrices that Muon updates, by name: those within a model, between its input and its output.

    They are all trained parameters of two dimensions or more, except the weights of embeddings (torch.nn.Embedding,
    EmbeddingBag, and what has a word in its name that begins with "emb"), of the output layer (that of a model of
    transformers, else the last torch.nn.Linear), and what has a single row or column. Of queries, keys and values each
    head has a matrix of its own (GLM-5, 2602.15763; Kimi K3, 2607.24653).
    """
    others = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    output = getattr(module, "get_output_embeddings", lambda: None)() or next(reversed(linears), None)
    others |= {id(getattr(output, "weight", None))}
    convolutions = {id(part.weight) for part in module.modules() if isinstance(part, _ConvNd)}
    heads = _head_rows(module)
    found = {
        name: Matrices.of(parameter.shape, id(parameter) in convolutions, heads.get(id(parameter)))
        for name, parameter in trained
        if id(parameter) not in others and not re.search(r"(?<![A-Za-z])emb", name)
    }
    return {name: matrices for name, matrices in found.items() if matrices}


def _head_rows(module: nn.Module) -> dict[int, int]:
    """Rows of one head, by the id of a weight that projects to queries, keys or values."""
    found: dict[int, int] = {}
    for part in module.modules():
        sizes = [getattr(part, name, None) for name in ("head_dim", "head_size", "attention_head_size")]
        rows = next((size for size in sizes if isinstance(size, int)), None)
        if rows:
            found |= {id(weight): rows for name, weight in part.named_parameters() if HEADS.fullmatch(name)}
    return found


def in_words(hidden: Mapping[str, Matrices], trained: Mapping[str, torch.Size]) -> str:
    """Which of the trained parameters Muon updates, and which AdamW; numbers of layers are shown as *."""
    share = sum(shape.numel() for name, shape in trained.items() if name in hidden)
    share /= sum(shape.numel() for shape in trained.values())
    others = [name for name in trained if name not in hidden]
    rest = f"adamw the rest ({_kinds(others)})" if others else "there is no rest"
    count = sum(matrices.stack[0] for matrices in hidden.values())
    kinds = _kinds(f"{name} by head" if matrices.is_by_head else name for name, matrices in hidden.items())
    return f"muon updates {count} matrices, {share:.0%} of the elements ({kinds}), {rest}"


def _kinds(names: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    further = [f"and {len(kinds) - MAX_KINDS} more"] if len(kinds) > MAX_KINDS else []
    return ", ".join([*kinds[:MAX_KINDS], *further])
