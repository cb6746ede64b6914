"""A request to stop: a signal, or a file; whatever the main thread of a process waits for."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType

from adloco_dist.config import EXIT_STOPPED

PR_SET_PDEATHSIG = 1
Position = tuple[int, int]
"""A round, and the place of an event in its plan; -1: before the first."""
BEFORE_ALL = (-1, 0)
LOOK_SECONDS = 0.2
"""Between two looks whether a rank is lost."""
AT_THE_END = 1 << 30
"""A place after all events of a round."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ask for a stop: Ctrl-C; the end of a job or container; two that batch systems send before a time limit;
a terminal closed."""


class Ask(IntEnum):
    """What ranks stop for; of several, what is greater counts."""

    nothing = 0
    newcomers = 1
    """Other nodes wait for a place: ranks go on together with them, at the end of the round."""
    leave = 2
    """A node leaves, and the others go on."""
    stop = 3


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop: by a signal or a file of this rank, or another rank has said so.

    A rank that hears of it begins no further event of its rounds until all ranks have said which one each of them has
    begun last. They end after the last of these, which nobody has passed: an average that one rank has entered needs
    all. The heartbeats speak for ranks that wait in one.
    """

    is_heard: bool = False
    """Whether a signal, a file from the start or the heartbeat has brought a request: a plain flag, because every
    update reads it."""
    own: Ask = Ask.nothing
    """What this rank itself was asked for, by a signal or the file."""
    heard: Ask = Ask.nothing
    """What others were asked for, or ask for."""
    leaves_at: Collection[signal.Signals] = ()
    """Signals after which this rank's node leaves, and others go on."""
    file: Path | None = None
    """File whose existence asks for a stop: for those who cannot send a signal, such as a batch script elsewhere."""
    has_newcomers: Callable[[], bool] = lambda: False
    """Whether other nodes wait for a place."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether a rank is lost, without which others go on."""
    held_at: Position | None = None
    """The event that this rank had begun when it heard of a request; None: of none yet."""
    last: Position | None = None
    """The event after which all ranks end; None: not agreed yet."""
    stirred: threading.Event = field(default_factory=threading.Event)
    """Set when this rank is held: the heartbeat, which sleeps between its beats, is to say so."""
    _begun: Position = BEFORE_ALL
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def watch(self, file: Path) -> None:
        """Take a file's existence for a request: before any event if it is there already, else as the heartbeat sees
        it."""
        self.file = file
        if file.exists():
            self.ask(Ask.stop)

    def renew(self) -> None:
        """Begin anew, with other ranks; what this one was asked for still counts."""
        self.held_at, self.last, self._begun = None, None, BEFORE_ALL
        self.heard, self.is_heard = Ask.nothing, self.own > Ask.nothing
        self.stirred.clear()

    def ask(self, what: Ask) -> None:
        """This rank itself is asked."""
        self.own, self.is_heard = max(self.own, what), True

    def hear(self, what: Ask) -> None:
        """Another rank or node asks."""
        self.heard, self.is_heard = max(self.heard, what), True

    def enter(self, round_number: int) -> None:
        """A round begins, of which updates may be taken before its first event."""
        with self._changed:
            if self.held_at is None:
                self._begun = (round_number, -1)

    def begins(self, event: Position) -> bool:
        """Whether the run goes on to an event, which all ranks of a trainer take part in, and which has begun then."""
        if self.is_heard:
            self.hold()
        with self._changed:
            self._wait_for_agreement()
            if self.last is not None and event > self.last:
                return False
            self._begun = event
            return True

    def ends_before(self, event: Position) -> bool:
        """Whether the run ends before an event; blocks until ranks have agreed, once there is a request."""
        if not self.is_heard:
            return False
        self.hold()
        with self._changed:
            self._wait_for_agreement()
        return self.last is not None and event > self.last

    def _wait_for_agreement(self) -> None:
        """Wait until all ranks have said where they stand, if this one is held, or one of them is lost, which whoever
        goes on will notice."""
        while self.held_at is not None and self.last is None and not self.is_lost():
            self._changed.wait(LOOK_SECONDS)

    def hold(self) -> None:
        """Begin no event from now on before ranks have agreed."""
        with self._changed:
            if self.held_at is None:
                self.held_at = self._begun
                self.stirred.set()

    def agree(self, last: Position) -> None:
        """Say after which event all ranks end."""
        with self._changed:
            self.last = last
            self._changed.notify_all()

    def wait_for_signal(self, seconds: float) -> None:
        """Wait until this process gets a signal, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while self.own is Ask.nothing and time.monotonic() < deadline:
            time.sleep(0.1)

    @property
    def requested(self) -> bool:
        """Whether any rank is asked for anything, as far as this one can see."""
        if self.file is not None and self.own is not Ask.stop and self.file.exists():
            self.ask(Ask.stop)
        if not self.is_heard and self.has_newcomers():
            self.hear(Ask.newcomers)
        return self.is_heard

    @property
    def asked(self) -> Ask:
        """What ranks stop for, as far as this one knows."""
        return max(self.own, self.heard)

    @property
    def ends_with_round(self) -> bool:
        """Whether all ranks end after the round, rather than within it."""
        return self.last is not None and self.last[1] == AT_THE_END


def heeded(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that mean something to this process: under nohup the end of the terminal does not."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in signals if number != signal.SIGHUP or not is_nohup]


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` take those of the signals that mean something here while the block runs. Main thread only."""
    previous = {number: signal.signal(number, handler) for number in heeded(signals)}
    yield
    for number, handler_before in previous.items():
        signal.signal(number, handler_before)


@contextmanager
def end_on_stop_signals() -> Iterator[None]:
    """Let every request to stop end this process in order and immediately while the block runs. Main thread only.

    An exception, as Python raises it for Ctrl-C, may be swallowed where nobody expects one: in a callback of an import.
    """
    with handling(STOP_SIGNALS, lambda signum, frame: os._exit(EXIT_STOPPED)):
        yield


def hold_signals(signals: Sequence[signal.Signals]) -> None:
    """Let signals wait until `stop_on_signals` takes them: they would end a process that is still importing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)


@contextmanager
def signals_held(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Let signals wait while the block runs; in processes that it starts, until these let them through."""
    hold_signals(signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


@contextmanager
def stop_on_signals(
    request: StopRequest, signals: Sequence[signal.Signals], is_meant: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Turn signals into a request while the block runs, those that were held before it too. Main thread only.

    A signal may come more than once (from the terminal and again from torchrun): it never ends the process, unless
    something else than a stop is meant by it.
    """

    def note(signum: int, frame: object) -> None:
        if not is_meant():
            os._exit(EXIT_STOPPED)
        request.ask(Ask.leave if signum in request.leaves_at else Ask.stop)

    with handling(signals, note):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        yield


def act_on_signals(signals: Sequence[signal.Signals], act: Callable[[signal.Signals], None]) -> None:
    """Call `act` for every signal from now on, in a thread of its own. Main thread only.

    Python runs handlers in the main thread, which may wait in a library for minutes: here the interpreter's wake-up
    descriptor notifies another one.
    """
    heard, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    chosen = heeded(signals)
    for number in chosen:
        signal.signal(number, lambda signum, frame: None)

    def listen() -> None:
        while number := os.read(heard, 1):
            if number[0] in chosen:
                act(signal.Signals(number[0]))

    threading.Thread(target=listen, name="signals", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent, whose id at the start is given, ends in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        os.kill(os.getpid(), signal.SIGKILL)


def begin_in_pool(parent: int) -> None:
    """Let a process of a pool end with its parent, and silently at Ctrl-C, also at one that was held."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, lambda signum, frame: os._exit(EXIT_STOPPED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
