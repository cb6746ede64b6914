"""From a batch to the passes that take it."""


def pass_size(batch: int, capacity: int | None) -> int:
    """Sequences per pass for a batch in the fewest passes that `capacity` allows, all equal but the last.

    Examples:
        10 sequences with a capacity of 4 take passes of 4, 4 and 2; 9 take 3, 3 and 3.
    """
    num_passes = -(-batch // capacity) if capacity else 1
    return -(-batch // num_passes)
