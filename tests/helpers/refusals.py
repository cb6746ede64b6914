"""What commands and ranks refuse, found out in this process: a real command takes seconds to import what it needs.

tests/launch has, for every command, one real process that shows that the line is printed and the exit code is right.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from unittest.mock import patch

import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import STOP_SIGNALS
from adloco_dist.config import Device, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.launch.driver import main
from adloco_dist.setup.agreement import prepare
from adloco_dist.setup.parts import NamedParts
from helpers.commands import WAIT
from helpers.lone import lone_rank

ACCEPTED = "accepted"


def refusal(*arguments: str, command: Callable[[list[str]], object] = main) -> str:
    """The one line with which a command refuses what it is asked, without its `error: `; it ends with 2.

    Args:
        command: the `main` of a module that launch/ has a file for; by default training.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    errors = StringIO()
    try:
        with patch.dict(os.environ), redirect_stderr(errors), pytest.raises(SystemExit) as end:
            command(list(arguments))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert end.value.code == 2
    (line,) = (line for line in errors.getvalue().splitlines() if not WAIT.search(line))
    assert line.startswith("error: "), line
    return line.removeprefix("error: ")


def refusal_of_rank(runtime: Runtime, *settings: str) -> str:
    """The line with which a rank refuses data, a model or batches to replay before a run exists; or `ACCEPTED`."""
    try:
        prepare(compose(settings), runtime, NamedParts())
    except SettingsError as error:
        assert "\n" not in str(error)
        return str(error)
    return ACCEPTED


def print_refusals() -> None:
    """What `refusal_of_rank` returns for each argument of this process: settings as a shell would read them."""
    with lone_rank(Device.cpu) as runtime:
        for words in sys.argv[1:]:
            print(refusal_of_rank(runtime, *shlex.split(words)))
