"""What a trainer's ranks average, and when: all that algorithms differ in to a round."""

from typing import Protocol

from adloco_dist.averaging.group import Group
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.config import WireSettings
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer


class Algorithm(Protocol):
    """Prepares the slot in which updates are computed, and brings workers together."""

    def prepare(self, slot: ComputeSlot, trainer: Trainer, group: Group | None) -> ComputeSlot:
        """Return the slot in which the trainer's workers compute; called once, when memory has been measured."""
        ...

    def average(self, trainer: Trainer, group: Group | None, fragment: int) -> OuterStepReport:
        """Bring the trainer's workers together, or prepare to. Collective over its ranks."""
        ...


class PseudoGradients:
    """DiLoCo, Local SGD and AdLoCo, which differ in settings alone: every fragment meets once a round."""

    def __init__(self, wire: WireSettings) -> None:
        self._wire = wire

    def prepare(self, slot: ComputeSlot, trainer: Trainer, group: Group | None) -> ComputeSlot:
        return slot

    def average(self, trainer: Trainer, group: Group | None, fragment: int) -> OuterStepReport:
        if self._wire.is_delayed:
            before = trainer.mix_awaited()  # in a last round that is too short for what is under way to be mixed in
            return before + trainer.start(fragment, group, is_delayed=True)
        return trainer.step(fragment, group)
