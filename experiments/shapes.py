"""Which rate of Muon suits which width and depth: one machine alone, constant batches, equal tokens, on the search's
sequences."""

from pathlib import Path

from cases import Case, cases

SEEDS = (100, 101)
BATCH = ("algorithm=localsgd", "batching.request=none", "batching.local_batch=8")
COURSE = ("inner=muon", "inner.schedule=constant", "outer.average_span=0.05")
RATES = ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2")
LONG, SHORT = 1_000_000, 500_000
"""Tokens."""
TRIED = {
    LONG: {
        (64, 2): (*RATES[2:], "3.2e-2"), (64, 8): RATES[1:], (128, 2): RATES[1:], (128, 4): RATES[1:4],
        (256, 2): RATES[:3],
    },
    SHORT: {(128, 4): RATES[1:4], (256, 4): RATES[1:3], (320, 8): RATES[:3]},
}  # fmt: skip
"""By tokens, width and depth: the rates. 64 x 2 is `nano`, 128 x 4 `tiny`, and 320 x 8 nearly `small`."""
TWO_SEEDS = ((64, 2), (128, 2))
"""Shapes of which there are runs with both seeds."""


def shape_of(width: int, depth: int) -> tuple[str, ...]:
    """A Llama of this width and depth, in the proportions of `tiny`."""
    heads, inner = (5 if width % 5 == 0 else 4), 8 * round(width * 2.7 / 8)
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": inner,
             "num_attention_heads": heads, "num_key_value_heads": heads}  # fmt: skip
    return ("model=tiny", *(f"model.overrides.{name}={size}" for name, size in sizes.items()))


def shapes(_: Path | None) -> list[Case]:
    """Which rate suits which width and depth?"""
    found = []
    for tokens, by_shape in TRIED.items():
        for (width, depth), rates in by_shape.items():
            for rate in rates:
                chosen = (*shape_of(width, depth), *BATCH, *COURSE, f"inner.lr={rate}")
                seeds = SEEDS if (width, depth) in TWO_SEEDS else SEEDS[:1]
                found += cases("shapes", f"{width}x{depth}_{rate}", 1, chosen, (tokens,), seeds, "tokens")
    return found
