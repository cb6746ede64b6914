"""How every command begins."""

import importlib
import os

from adloco_dist.cluster.signals import STOP_SIGNALS, end_on_signals
from adloco_dist.terminal import protect_streams


def run_command(module: str) -> None:
    """Import the module of a command, which takes seconds, and call its `main`; requests to stop are heard."""
    protect_streams()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank: its agent knows what to do with it
        importlib.import_module(module).main()
        return
    with end_on_signals(STOP_SIGNALS):
        main = importlib.import_module(module).main
    main()
