"""Workers whose pseudo-gradients are far longer than they were before: left out of an average (EDiT, 2412.07210)."""

import torch

DECAY = 0.02
"""Weight of a new norm in the running mean, which at first is a plain one."""


class NormHistory:
    """Running means and variances of the norms of one worker's pseudo-gradients, by fragment.

    Attributes:
        values: (num_fragments, 3), fp64, on the CPU: norms seen, their mean, their variance.
    """

    def __init__(self, num_fragments: int) -> None:
        self.values = torch.zeros(num_fragments, 3, dtype=torch.float64)

    def is_outlier(self, fragment: int, norm: float, deviations: float, min_norms: int) -> bool:
        """Whether a norm is above the mean by more than so many standard deviations; it is added to them.

        What an outlier is above that bound is not added: one moves the bound by little, and many of them move it.

        Args:
            min_norms: norms that must have been seen before; none is an outlier until then.
        """
        seen, mean, variance = self.values[fragment].tolist()
        bound = mean + deviations * variance**0.5
        is_outlier = seen >= min_norms and norm > bound
        weight = max(DECAY, 1 / (seen + 1))
        change = (bound if is_outlier else norm) - mean
        updated = (seen + 1, mean + weight * change, (1 - weight) * (variance + weight * change**2))
        self.values[fragment] = torch.tensor(updated, dtype=torch.float64)
        return is_outlier
