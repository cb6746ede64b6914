"""The commands: a driver that starts torchrun, what each rank does under it, and settings from Hydra."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn


def launch(
    *,
    model: Callable[[], Any],
    data: Callable[[], Any],
    loss: Callable[[Any, Any], tuple[Any, int] | tuple[Any, int, int]],
    collate: Callable[[list[Any]], Any] | None = None,
    blocks: Callable[[Any], Sequence[Any]] | None = None,
) -> NoReturn:
    """Train a user's own model on the user's own data, with settings from the command line; ends the process.

    Called at the end of a script, under `if __name__ == "__main__":`. The script is then a full launcher: alone it
    starts the ranks of this machine, under torchrun it is one of the ranks. It takes the options and settings of
    launch/train.py except those of `model` and `data`.

    Args:
        model: returns the module, with weights drawn from torch's random numbers, which are seeded before.
        data: returns (train, validation). Each has a length and items by number; training data may instead be a
            function stream(index, count) that returns part `index` of `count` as an iterable with a state.
        loss: takes the module and a batch; returns the loss summed over the batch's targets, and their number; as a
            third value, for an accuracy, how many of them were predicted correctly.
        collate: makes a batch of a list of items; None: torch's default_collate.
        blocks: takes the module; returns its layers, which ranks that hold a worker together (pool.ranks_per_worker)
            gather one by one. None: the members of its lists of layers of one class.
    """
    from adloco_dist.launch.driver import main
    from adloco_dist.setup.parts import OwnParts

    main(parts=OwnParts(model, data, loss, collate, blocks))
