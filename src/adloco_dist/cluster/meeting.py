"""What a driver tells its ranks about other nodes, which come and go."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MEETING = "ADLOCO_MEETING"
"""Environment variable of ranks whose node may lose others and go on: a `Meeting`, as JSON."""


@dataclass(frozen=True)
class Terms:
    """What somebody who takes part in a run from the middle of it needs to know, beside where it is."""

    least: int
    most: int
    run: str
    max_restarts: int
    overrides: Sequence[str]
    """Settings, as they were typed."""


@dataclass(frozen=True)
class Meeting:
    """How nodes find each other, as their drivers tell their ranks."""

    addresses: Sequence[str]
    """HOST:PORT of one node or several; whoever starts looks there."""
    least: int
    """Number of nodes with which the run goes on."""
    most: int
    own_host: str | None
    """Where the others reach this node; None: at its address on the way to them."""
    seconds: float
    """How long a node that starts waits for others."""
    run: str
    """Keeps runs apart that meet at one address."""

    @classmethod
    def from_environment(cls) -> "Meeting | None":
        """What the driver has said; None: nothing, as ranks are those of a world that is fixed."""
        return cls(**json.loads(os.environ[MEETING])) if MEETING in os.environ else None

    def to_environment(self) -> None:
        """Tell it to the processes that this one starts."""
        os.environ[MEETING] = json.dumps(asdict(self))

    @property
    def wanted(self) -> str:
        """How many nodes the run needs, in words."""
        return nodes_in_words(self.least, self.most)


def nodes_in_words(least: int, most: int) -> str:
    """So many nodes."""
    return f"{'' if least == most else f'{least} to '}{most} nodes"
