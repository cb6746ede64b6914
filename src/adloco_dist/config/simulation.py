"""A run on a simulated clock: what it would take on other machines and links, decided by the same code."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ReadWhen

SIMULATED = ReadWhen("simulation.update_seconds!=null")


@dataclass
class SimulationSettings:
    """Seconds that are counted instead of measured, where `update_seconds` is set; every rank stands for a host."""

    update_seconds: float | None = None
    """Time of an update of one worker apart from its sequences, > 0; null: the real clock is read."""
    sequence_seconds: Annotated[float, SIMULATED] = 0.0
    """Time of each sequence of an update."""
    bytes_per_second: Annotated[float | None, SIMULATED] = None
    """Rate of every host's link, in either direction, > 0; null: bytes take no time."""
    latency_seconds: Annotated[float, SIMULATED] = 0.0005
    """Time of a message from one host to another, apart from its bytes."""

    @property
    def is_on(self) -> bool:
        return self.update_seconds is not None

    def __post_init__(self) -> None:
        update = self.update_seconds
        if update is not None and not 0 < update < inf:
            raise SettingsError.of("simulation.update_seconds", update, "must be > 0, or null for the real clock")
        for name in ("sequence_seconds", "latency_seconds"):
            if not 0 <= getattr(self, name) < inf:
                raise SettingsError.of(f"simulation.{name}", getattr(self, name), "must be >= 0 seconds")
        rate = self.bytes_per_second
        if rate is not None and not rate > 0:
            raise SettingsError.of("simulation.bytes_per_second", rate, "must be > 0, or null")

    def transfer_seconds(self, num_bytes: int) -> float:
        """What these bytes take on a host's link, without latency."""
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
