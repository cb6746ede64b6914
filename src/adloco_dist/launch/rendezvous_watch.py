"""Contact with the host of the rendezvous: who has come there is reported while a driver waits, and so is its loss.

torchrun's agent waits without a word, in calls that end long after their timeouts where that host has vanished, and
never where another program listens on its port (docs/lab-notes.md).
"""

import itertools
import socket
import threading
import time
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)

from adloco_dist.config import EXIT_FAILURE, EXIT_USER_ERROR
from adloco_dist.launch.exit_codes import leave, num_beginnings, restart
from adloco_dist.launch.rendezvous import Rendezvous
from adloco_dist.terminal import report_error

EVERY_SECONDS = 1.0
REPORT_EVERY_SECONDS = 30.0
"""Nodes that are missing may be missing for long: this is reported less often than work that takes its time."""
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""Links that are cut for less are waited for: a node without its agent would stay away until it is started by hand."""
LOST_SECONDS = 120.0
"""A driver that could join again gives the host of the rendezvous so long to come back: it may as well be lost."""
CLIENT_SECONDS = 4.0
"""Timeout of an attempt to become a client of the store."""
STRANGER_SECONDS, SILENT_STRANGER_SECONDS = 10.0, 16.0
"""What listens for so long and turns clients away is no store; nor is what lets them wait for so long."""
STALE_SECONDS = 10.0
"""A driver that has said nothing for so long is no longer there."""
BEGIN_SECONDS = 2.0
"""Drivers that are started together have met by then."""
RESTART_SECONDS = 15.0
"""Agents that start their ranks again, or end together, take so long without that anything is wrong."""


def watch_rendezvous(rendezvous: Rendezvous, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Report who is waited for as long as this process has no ranks, and end it where it would wait in vain.

    It ends when what listens at the endpoint is no store, and when its ranks have ended and the endpoint's host, once
    reached, no longer answers: an elastic job waits for it twice as long, and then joins again. (A refusal is an
    answer: the host lives, and has closed the store's connections, which the agent notices by itself.)

    Raises:
        SettingsError: the endpoint is no host and port.
    """
    watch = _Watch(rendezvous, patience_seconds)
    threading.Thread(target=watch.run, name="rendezvous-watch", daemon=True).start()


class _Watch:
    """What this driver knows of the others."""

    def __init__(self, rendezvous: Rendezvous, patience_seconds: float) -> None:
        self._rendezvous, self._patience = rendezvous, patience_seconds
        self._host, self._port = rendezvous.place()
        self._presence = _Presence(self._host, self._port, rendezvous.job)

    def run(self) -> None:
        start = time.monotonic()
        answered_at: float | None = None
        silent_at, waiting_since, reported_at, had_ranks = start, start, -REPORT_EVERY_SECONDS, False
        patience_of = {False: BEGIN_SECONDS, True: RESTART_SECONDS}
        while True:
            answer = reach(self._host, self._port)
            now, has_ranks = time.monotonic(), _has_ranks()
            if not answer:
                silent_at = now
            elif self._presence.is_refused(now - silent_at):
                endpoint = f"--rdzv-endpoint={self._host}:{self._port}"
                report_error(f"error: {endpoint}: another program listens there, and no torchrun; choose another port")
                leave(EXIT_USER_ERROR)
            silence = 0.0 if answered_at is None or has_ranks else now - answered_at
            if answer and silence > self._patience and self._may_join_again:  # its calls may never return
                restart()
            if answer is not None:
                answered_at = now
            elif silence > (max(LOST_SECONDS, self._patience) if self._may_join_again else self._patience):
                where = f"the host of the rendezvous at {self._host}:{self._port} has not answered"
                line = f"ended on {socket.gethostname()}: {where} for {silence:.0f} s"
                report_error(f"{line}; start the job again, which resumes from its checkpoint")
                leave(EXIT_FAILURE)
            if has_ranks:
                waiting_since, had_ranks = now, True
            elif now - waiting_since >= patience_of[had_ranks] and now - reported_at >= REPORT_EVERY_SECONDS:
                reported_at = now
                report_error(self._line(answer))
            time.sleep(EVERY_SECONDS)

    @property
    def _may_join_again(self) -> bool:
        return num_beginnings() < self._rendezvous.max_restarts

    def _line(self, answer: bool | None) -> str:
        waiting = f"waiting at {self._host}:{self._port} for {self._rendezvous.wanted}"
        if hosts := self._presence.hosts() if answer else []:
            count = "1 is" if len(hosts) == 1 else f"{len(hosts)} are"
            return f"{waiting}: {count} here ({', '.join(hosts)}); start the same command on the others"
        if answer:
            return f"{waiting}: something listens there, and has not let this node in yet"
        reason = "that host does not answer" if answer is None else "nothing listens there yet"
        return f"{waiting}: {reason}; start the same command on {self._host}, and open that port"


class _Presence:
    """Which drivers have come to a rendezvous, by their own account in its store.

    In a thread of its own: a call to a store whose host has vanished may never return.
    """

    def __init__(self, host: str, port: int, job: str) -> None:
        self._host, self._port, self._prefix = host, port, f"adloco/{job}/drivers"
        self._has_joined, self._refusals = False, 0
        """Whether there ever was a store, and how many attempts have failed."""
        self._said: dict[int, str] = {}
        """What every driver has said last."""
        self._fresh: dict[int, float] = {}
        """The time until which that counts as new."""
        threading.Thread(target=self._run, name="rendezvous-presence", daemon=True).start()

    def is_refused(self, seconds: float) -> bool:
        """Whether what has listened for so long is no store."""
        patience = STRANGER_SECONDS if self._refusals >= 2 else SILENT_STRANGER_SECONDS
        return not self._has_joined and seconds > patience

    def hosts(self) -> list[str]:
        """Return the hosts whose drivers have spoken of late, sorted."""
        now = time.monotonic()
        return sorted(said.rpartition(" ")[0] for index, said in dict(self._said).items() if now < self._fresh[index])

    def _run(self) -> None:
        while True:
            try:
                self._speak_on()
            except (RuntimeError, ValueError):  # no store yet, or no more; the next one is another
                self._refusals += 1
                self._said.clear()
            time.sleep(EVERY_SECONDS)

    def _speak_on(self) -> None:
        seconds = timedelta(seconds=CLIENT_SECONDS)
        store = TCPStore(self._host, self._port, is_master=False, timeout=seconds, wait_for_workers=False)
        mine = store.add(self._prefix, 1)
        self._has_joined = True
        for number in itertools.count():
            store.set(f"{self._prefix}/{mine}", f"{socket.gethostname()} {number}")
            others = 0 if _has_ranks() else store.add(self._prefix, 0)  # nobody asks for them while it trains
            for index in range(1, others + 1):
                key = f"{self._prefix}/{index}"
                said = store.get(key).decode(errors="replace") if store.check([key]) else ""
                if said != self._said.get(index, ""):
                    self._fresh[index] = time.monotonic() + STALE_SECONDS
                    self._said[index] = said
            time.sleep(EVERY_SECONDS)


def reach(host: str, port: int) -> bool | None:
    """Whether something listens at that port; None: the host does not answer."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _has_ranks() -> bool:
    """Whether a rank of this node still runs; the agent has not buried those that have ended."""
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            continue
    return False
