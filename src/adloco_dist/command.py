"""How commands begin and end. What takes time is imported late: whoever asks to stop meanwhile is to be heard."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

STOPPED = 75
"""EXIT_STOPPED, whose module takes a tenth of a second to import."""


@contextmanager
def importing() -> Iterator[None]:
    """Import in the block without garbage collections, which would find nothing and take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # else the next collection would look through all that was imported
        if was_enabled:
            gc.enable()


def run_command(module: str) -> None:
    """Import the module of a command, which takes seconds, and call its `main`; requests to stop are heard."""
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ  # its agent knows what to do with it
    previous = signal.getsignal(signal.SIGINT)  # ignored, in the background of a script
    if not is_rank:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(STOPPED))
    from adloco_dist.cluster.signals import end_on_stop_signals
    from adloco_dist.terminal import protect_streams

    protect_streams()
    with nullcontext() if is_rank else end_on_stop_signals(), importing():
        main = importlib.import_module(module).main
    if not is_rank:
        signal.signal(signal.SIGINT, previous)
    main()


@contextmanager
def reported_in_one_line(speaks: bool = True) -> Iterator[None]:
    """End the process at a `SettingsError` with its line, and at Ctrl-C, instead of with a traceback.

    Of several processes that raise the same error, one `speaks`.
    """
    from adloco_dist.config import EXIT_USER_ERROR, SettingsError
    from adloco_dist.terminal import report_error

    try:
        yield
    except SettingsError as error:
        if speaks:
            report_error(f"error: {error}")
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


@contextmanager
def as_tool() -> Iterator[None]:
    """Turn mistakes of the user, Ctrl-C and lost output into exit codes, in a tool whose product is what it prints."""
    from adloco_dist.config import EXIT_FAILURE
    from adloco_dist.terminal import output_was_lost, protect_streams

    protect_streams()
    with reported_in_one_line():
        yield
        if output_was_lost():
            sys.exit(EXIT_FAILURE)
