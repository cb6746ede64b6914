"""Losses of a model's predictions, in nats: eager or compiled.

Shape suffixes: B sequences, W tokens of the longest of them, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from adloco_dist.data.tokens import TokenBatch

Losses = Callable[[Callable[..., Any], TokenBatch], torch.Tensor]
"""`losses`, or the same compiled."""
NO_TARGET = -100
"""The label that torch's cross-entropy ignores."""


def losses(module: Callable[..., Any], batch: TokenBatch) -> torch.Tensor:
    """Cross-entropy in nats of everything that is predicted, in at least fp32: (B, W - 1), or (B,) of labels; 0 at
    padding. The module may be a function that is called like one of transformers."""
    return losses_of(predict(module, batch), batch)


def fused_losses(device: torch.device) -> Losses:
    """`losses` whose last part, from the logits on, is compiled: a few kernels instead of a dozen on a GPU. Raises
    whatever torch raises where it cannot compile for `device` (no compiler, no Triton)."""
    fused = torch.compile(losses_of)
    batch = TokenBatch.packed(torch.zeros(2, 5, dtype=torch.int64, device=device))
    logits = torch.zeros(2, 4, 3, device=device, requires_grad=True)
    fused(logits, batch).sum().backward()
    return lambda module, batch: fused(predict(module, batch), batch)


def predict(module: Callable[..., Any], batch: TokenBatch) -> torch.Tensor:
    """Logits: (B, W - 1, V) of a causal model, (B, labels) of a classifier."""
    if batch.labels is None:  # causal attention never sees the padding at the right
        return module(input_ids=batch.tokens[:, :-1], use_cache=False).logits
    return module(input_ids=batch.tokens, attention_mask=_is_token(batch)).logits


def losses_of(logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """`losses` of logits. This is the only place where labels are shifted."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if batch.labels is not None:
        return F.cross_entropy(logits, batch.labels, reduction="none")
    targets = batch.tokens[:, 1:]
    if batch.lengths is not None:
        targets = targets.masked_fill(~_is_token(batch)[:, 1:], NO_TARGET)
    flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NO_TARGET)
    return flat.view(targets.shape)


def _is_token(batch: TokenBatch) -> torch.Tensor:
    """(B, W): which positions are not padding."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    assert batch.lengths is not None
    return positions < batch.lengths[:, None]
