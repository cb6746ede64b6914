"""Runs that torchrun starts again: what the next start needs, and whether there is anything left to do."""

import os
from pathlib import Path

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import Settings, SettingsError, Unfinished
from adloco_dist.launch.nodes import check_restarts
from adloco_dist.run.directory import is_finished


def check_restarts_of_rank(settings: Settings) -> None:
    """Check that under torchrun --max-restarts the next start would find what this one leaves.

    Raises:
        SettingsError: it would not.
    """
    check_restarts(settings, _max_restarts())


def check_store_of_restarts() -> None:
    """Refuse a store that torchrun keeps between starts; called before this rank looks into it.

    Raises:
        SettingsError: this rank would look into what the last start left there.
    """
    restarts = _max_restarts()
    keeps_store = restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rule = "torchrun would keep its store, with what the last start left there"
    remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"
    if keeps_store:
        raise SettingsError.of("--max-restarts", restarts, f"{rule}; {remedy}")


def is_elastic() -> bool:
    """Whether torchrun starts the ranks again when one fails, or nodes come and go."""
    return _max_restarts() > 0


def _max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def has_ended(control: ControlPlane, settings: Settings) -> bool:
    """Whether the run that is to resume has come to its own end, as who starts it again and again may not know."""
    run = settings.run
    ended = run.unfinished is Unfinished.resume and run.directory is not None and is_finished(Path(run.directory))
    return any(reply["ended"] for reply in control.exchange({"ended": ended}))
