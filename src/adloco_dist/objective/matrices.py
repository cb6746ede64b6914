"""Which of a module's parameters are matrices between its input and its output, which Muon updates."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

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
    def of(cls, shape: tuple[int, ...], is_convolution: bool) -> "Matrices | None":
        """A convolution's kernels side by side are one matrix, with a row for each of dimension 0; of other shapes the
        last two dimensions are a matrix. None: there is none of two rows and two columns."""
        stacked = (1, shape[0], math.prod(shape[1:])) if is_convolution else (math.prod(shape[:-2]), *shape[-2:])
        return cls(shape, stacked) if len(stacked) == 3 and min(stacked[1:]) > 1 else None


def hidden_matrices(module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Matrices]:
    """The matrices that Muon updates, by name: those within a model, between its input and its output.

    They are all trained parameters of two dimensions or more, except the weights of embeddings (torch.nn.Embedding,
    EmbeddingBag, and what has a word in its name that begins with "emb"), of the output layer (that of a model of
    transformers, else the last torch.nn.Linear), and what has a single row or column.
    """
    others = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    output = getattr(module, "get_output_embeddings", lambda: None)() or next(reversed(linears), None)
    others |= {id(getattr(output, "weight", None))}
    convolutions = {id(part.weight) for part in module.modules() if isinstance(part, _ConvNd)}
    found = {
        name: Matrices.of(parameter.shape, id(parameter) in convolutions)
        for name, parameter in trained
        if id(parameter) not in others and not re.search(r"(?<![A-Za-z])emb", name)
    }
    return {name: matrices for name, matrices in found.items() if matrices}


def in_words(hidden: Mapping[str, Matrices], trained: Mapping[str, torch.Size]) -> str:
    """Which of the trained parameters Muon updates, and which AdamW; numbers of layers are shown as *."""
    share = sum(shape.numel() for name, shape in trained.items() if name in hidden)
    share /= sum(shape.numel() for shape in trained.values())
    others = [name for name in trained if name not in hidden]
    rest = f"adamw the rest ({_kinds(others)})" if others else "there is no rest"
    return f"muon updates {len(hidden)} matrices, {share:.0%} of the elements ({_kinds(hidden)}), {rest}"


def _kinds(names: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    further = [f"and {len(kinds) - MAX_KINDS} more"] if len(kinds) > MAX_KINDS else []
    return ", ".join([*kinds[:MAX_KINDS], *further])
