"""A driver's contact with the host of the rendezvous: it reports who has come there while it waits, and a loss.

torchrun's agent waits silently. Its calls end long after their timeouts where that host has vanished, and never where
another program listens on its port (docs/lab-notes.md).
"""

import itertools
import socket
import threading
import time
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)

from adloco_dist.config import EXIT_FAILURE, EXIT_USER_ERROR
from adloco_dist.launch.exit_codes import end_driver
from adloco_dist.launch.rendezvous import Rendezvous
from adloco_dist.terminal import report_error

EVERY_SECONDS = 1.0
REPORT_EVERY_SECONDS = 30.0
"""Between two reports of missing nodes, which may be missing for long."""
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""A link that is cut for less is waited for: a node whose agent ends stays away until it is started by hand."""
CLIENT_SECONDS = 4.0
"""Timeout of an attempt to become a client of the store."""
STRANGER_SECONDS = 16.0
"""What listens for this long without serving a client is no store."""
STALE_SECONDS = 10.0
"""A driver that has been silent for this long is gone."""
BEGIN_SECONDS = 2.0
"""Drivers that are started together have met by then."""
RESTART_SECONDS = 15.0
"""Agents that start their ranks again, or end together, may take this long."""


def watch_rendezvous(rendezvous: Rendezvous, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Report who is waited for as long as this process has no ranks, and end it where it would wait in vain.

    It ends when what listens at the endpoint is no store, and when its ranks have ended and the endpoint's host, once
    reached, no longer answers. (A refusal is an answer: the host lives, and has closed the store's connections, which
    the agent notices by itself.)
    """
    watch = _Watch(rendezvous, patience_seconds)
    threading.Thread(target=watch.watch, name="rendezvous-watch", daemon=True).start()
    # In a thread of its own: a call to a store whose host has vanished may never return.
    threading.Thread(target=watch.meet, name="rendezvous-presence", daemon=True).start()


class _Watch:
    """What this driver knows of the rendezvous, and of other drivers by what they write into its store."""

    def __init__(self, rendezvous: Rendezvous, patience_seconds: float) -> None:
        self._rendezvous, self._patience = rendezvous, patience_seconds
        self._host, self._port = rendezvous.place()
        self._has_met_store = False
        self._said: dict[int, tuple[str, float]] = {}
        """What every driver has said last, and until when that counts as new."""

    def watch(self) -> None:
        """Look at the endpoint again and again."""
        nothing_listened_at = had_ranks_at = time.monotonic()
        answered_at, reported_at, had_ranks = None, -REPORT_EVERY_SECONDS, False
        while True:
            answer, now = reach(self._host, self._port), time.monotonic()
            if not answer:
                nothing_listened_at = now
            elif not self._has_met_store and now - nothing_listened_at > STRANGER_SECONDS:
                endpoint = f"--rdzv-endpoint={self._host}:{self._port}"
                report_error(f"error: {endpoint}: another program listens there, and no torchrun; choose another port")
                end_driver(EXIT_USER_ERROR)
            if _has_ranks():
                had_ranks_at, had_ranks = now, True
            else:
                self._end_without_host(answer, 0.0 if answered_at is None else now - answered_at)
                patience = RESTART_SECONDS if had_ranks else BEGIN_SECONDS
                if now - had_ranks_at >= patience and now - reported_at >= REPORT_EVERY_SECONDS:
                    reported_at = now
                    report_error(self._line(answer))
            if answer is not None:
                answered_at = now
            time.sleep(EVERY_SECONDS)

    def _end_without_host(self, answer: bool | None, silence: float) -> None:
        """End where the host has answered, and then has not for too long."""
        if answer is None and silence > self._patience:
            where = f"the host of the rendezvous at {self._host}:{self._port} has not answered"
            line = f"ended on {socket.gethostname()}: {where} for {silence:.0f} s"
            report_error(f"{line}; start the job again, which resumes from its checkpoint")
            end_driver(EXIT_FAILURE)

    def _line(self, answer: bool | None) -> str:
        """Whom this driver waits for."""
        waiting, now = f"waiting at {self._host}:{self._port} for {self._rendezvous.wanted}", time.monotonic()
        hosts = sorted(said.rpartition(" ")[0] for said, until in list(self._said.values()) if now < until)
        if answer and hosts:
            count = "1 is" if len(hosts) == 1 else f"{len(hosts)} are"
            return f"{waiting}: {count} here ({', '.join(hosts)}); start the same command on the others"
        if answer:
            return f"{waiting}: something listens there, and has not let this node in yet"
        reason = "that host does not answer" if answer is None else "nothing listens there yet"
        return f"{waiting}: {reason}; start the same command on {self._host}, and open that port"

    def meet(self) -> None:
        """Tell other drivers that this one is here, and listen to them, in one store after the other."""
        while True:
            try:
                self._meet_in_store()
            except (RuntimeError, ValueError):  # no store yet, or no more; the next one is another
                self._said.clear()
            time.sleep(EVERY_SECONDS)

    def _meet_in_store(self) -> None:
        seconds, prefix = timedelta(seconds=CLIENT_SECONDS), f"adloco/{self._rendezvous.job}/drivers"
        store = TCPStore(self._host, self._port, is_master=False, timeout=seconds, wait_for_workers=False)
        number_here = store.add(prefix, 1)
        self._has_met_store = True
        for number in itertools.count():
            store.set(f"{prefix}/{number_here}", f"{socket.gethostname()} {number}")
            others = 0 if _has_ranks() else store.add(prefix, 0)  # nobody asks for them while it trains
            for index in range(1, others + 1):
                key = f"{prefix}/{index}"
                said = store.get(key).decode(errors="replace") if store.check([key]) else ""
                if said != self._said.get(index, ("", 0.0))[0]:
                    self._said[index] = said, time.monotonic() + STALE_SECONDS
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
