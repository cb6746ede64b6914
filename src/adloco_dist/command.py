"""How every command begins. Nothing is imported here that takes time: whoever asks to stop meanwhile is to be heard."""

import importlib
import os
import signal

STOPPED = 75
"""EXIT_STOPPED, whose module takes a tenth of a second to import."""


def run_command(module: str) -> None:
    """Import the module of a command, which takes seconds, and call its `main`; requests to stop are heard."""
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ  # its agent knows what to do with it
    previous = signal.getsignal(signal.SIGINT)  # ignored, in the background of a script
    if not is_rank:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(STOPPED))
    from contextlib import nullcontext

    from adloco_dist.cluster.signals import STOP_SIGNALS, end_on_signals
    from adloco_dist.terminal import protect_streams

    protect_streams()
    with nullcontext() if is_rank else end_on_signals(STOP_SIGNALS):
        main = importlib.import_module(module).main
    if not is_rank:
        signal.signal(signal.SIGINT, previous)
    main()
