"""An average of the anchors of a run: less noise than the last one has, and nothing that is sent for it.

Polynomial-decay averaging (Shamir and Zhang 2013, 1212.1824, section 4): the average spans a share of what lies behind,
so it forgets the start of the run however long that becomes.
"""

import torch

from adloco_dist.averaging.outer import chunks


def weight_of(tokens_before: int, tokens: int, span: float) -> float:
    """What the anchor counts for in its average after a round; the rest is the average before.

    Args:
        tokens_before: tokens of the run before the round.
        tokens: tokens of the round, > 0.
        span: share of the tokens so far over which an anchor's weight falls by a factor of e, about; in (0, 1].
    """
    return 1.0 - (tokens_before / (tokens_before + tokens)) ** (1.0 / span)


def average_in(mean: torch.Tensor, anchor: torch.Tensor, weight: float) -> None:
    """Move the average towards the anchor in place, (n,) both, in operations that round alike on every device."""
    for chunk in chunks(len(mean), mean.device):
        mean[chunk].mul_(1.0 - weight).add_(anchor[chunk] * weight)
