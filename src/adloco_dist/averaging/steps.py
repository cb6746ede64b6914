"""When anybody's loop has taken an update: from the steps of its optimizers alone."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

log = logging.getLogger("adloco_dist.diloco")


class StepCounter:
    """Calls a method after every update, once it is open.

    An update ends with a step of the last optimizer of the list, so that what is called never falls between two
    optimizers of one update, whichever of them skips a step. Optimizers that step within the backward pass (in hooks of
    the gradients) end an update with that pass, however many of them step: nothing is called before it is over.

    Attributes:
        is_open: whether updates are counted.
        is_used: whether they have ever been, here or by hand.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], count: Callable[[], None]) -> None:
        """`count`, a bound method whose object is not kept alive, is called after each update of these optimizers,
        which are in the order in which the loop steps them."""
        self._optimizers, self._count = optimizers, weakref.WeakMethod(count)
        self.is_open = self.is_used = self._awaits_backward = False
        self._num_outside = 0
        self._last_gradients: list[_Seen | None] = []
        # Inside of a compiled optimizer step, too, what is called is not compiled.
        hook: Any = torch.compiler.disable(self._after_step)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(hook)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._count() is None:
            return  # what counted is gone
        if float(getattr(optimizer, "found_inf", 0)):
            return  # GradScaler has a fused optimizer's step called, too, when there is none to take
        if not self.is_open:
            self._note_outside(optimizer)
        elif torch._C._current_graph_task_id() < 0:
            self._step_of(optimizer)
        elif not self._awaits_backward:
            self._awaits_backward = True
            Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._awaits_backward = False
        self._call()

    def _step_of(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self._optimizers[-1]:
            self._last_gradients = [_first_gradient(other) for other in self._optimizers[:-1]]
            self._call()
            return
        place = next(place for place, other in enumerate(self._optimizers) if other is optimizer)
        before, self._last_gradients = self._last_gradients, []
        # Its gradients were there, and as they are, when the last optimizer of the list stepped: since then no backward
        # pass has written to them, and no zeroing.
        then, now = before[place] if before else None, _first_gradient(optimizer)
        if then and now and then[0]() is now[0]() and then[1] == now[1]:
            rule = f"its number {place + 1} steps after its last one in the same update"
            raise ValueError(f"optimizer: {rule}; list optimizers in the order in which the loop steps them")

    def _call(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            rule = "its step is captured in a CUDA graph, whose replays would average nothing"
            raise ValueError(f"optimizer: {rule}; capture outside of the block, and call count_update() after each one")
        if count := self._count():
            count()

    def _note_outside(self, optimizer: torch.optim.Optimizer) -> None:
        """Say that a block was forgotten: at the second update, as whoever counts by hand has counted the first."""
        if optimizer is self._optimizers[-1] and not self.is_used:
            self._num_outside += 1
            if self._num_outside == 2:
                log.warning(
                    "the optimizer steps outside of a block of DiLoCo: nothing is averaged; use it as in "
                    "`with DiLoCo(model, optimizer):`, or call count_update() after each update"
                )


_Seen = tuple[weakref.ref[torch.Tensor], int]
"""A gradient, which is not kept alive, and how often it had been written to."""


def _first_gradient(optimizer: torch.optim.Optimizer) -> _Seen | None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradient = next((parameter.grad for parameter in parameters if parameter.grad is not None), None)
    return None if gradient is None else (weakref.ref(gradient), gradient._version)
