"""Who lives, and where everybody stands: reported through the store, whatever collectives hang."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from adloco_dist.averaging.checks import is_timeout
from adloco_dist.cluster.contact import FIXED, Contact
from adloco_dist.cluster.failures import FIRST_FAILURE
from adloco_dist.cluster.signals import AT_THE_END, Ask, StopRequest
from adloco_dist.text import first_line

STOP, LAST_EVENT = "stop_requested", "last_event"
"""Keys in the store: a rank was asked to stop; the event after which all ranks do."""
START_SECONDS = 120.0
"""How long a rank may be silent that was never heard of: it may still be importing."""
PATIENCE = timedelta(hours=24)
"""How long a thread waits that has nothing else to do."""
MAX_NAMED = 4
"""Maximum number of awaited ranks that a line names."""


def own_client(store: Store) -> Store:
    """The same store through another connection, for another thread."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub has forgotten it)


def patient_client(store: Store) -> Store:
    """As `own_client`, for a thread that waits for what other ranks write; those that die are noticed by the
    heartbeat."""
    client = own_client(store)
    client.set_timeout(PATIENCE)
    return client


class OwnClock:
    """Seconds in which this process ran, for a thread that looks at it every `every_seconds`.

    A process that is stopped or frozen (Ctrl-Z, a paused container or machine), or whose interpreter one long call
    holds, hears nobody. That is no silence of the others: they get all their time again.
    """

    def __init__(self, every_seconds: float) -> None:
        self._longest, self._last = 2 * every_seconds, time.monotonic()
        """Two looks further apart than this mean that the process stood still."""
        self.seconds = 0.0
        self.resumed_at = 0.0
        """When the process last continued after it had stood still, in those seconds."""

    def tick(self) -> float:
        """The seconds so far."""
        now = time.monotonic()
        if now - self._last > self._longest:
            self.resumed_at = self.seconds
        else:
            self.seconds += now - self._last
        self._last = now
        return self.seconds


class Heartbeat:
    """Shows all ranks that this one lives, notices when another is dead or has failed, and passes on stop requests.

    Rank 0 listens to all ranks, the others to rank 0 alone: what a beat costs hardly grows with their number. A
    thread talks to the store through a client of its own. A second one watches that the store still answers: when the
    node of rank 0 vanishes, no call to it returns.

    Attributes:
        stop: whether any rank was asked to stop, and after which event all ranks do.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        every_seconds: float,
        silence_seconds: float,
        stop: StopRequest,
        contact: Contact = FIXED,
    ) -> None:
        """`contact` does what is to be done when another rank is lost."""
        self.hosts: Sequence[str] = ["a host that was not heard of"] * world_size
        """Host name of every rank, for reports; set once they are known."""
        self._store = own_client(store)
        self._store.set_timeout(timedelta(seconds=silence_seconds))
        self._rank, self.stop, self._contact = rank, stop, contact
        self._every, self._silence = every_seconds, silence_seconds
        self._place, self._stage = "start", 0
        self._heard = {other: (b"", 0.0) for other in (range(world_size) if rank == 0 else [0])}
        """By rank: its last beat, and when this rank's own clock first saw it."""
        self._keys = [STOP, LAST_EVENT, FIRST_FAILURE, *map(_key, self._heard)]
        for key in self._keys:  # empty until somebody writes it, so that one call reads all
            self._store.compare_set(key, "", "")
        self._answers = 0
        """Beats that the store has answered so far."""
        self._is_silent, self._announced = False, threading.Event()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("heartbeat", self._beat_on), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, place: str) -> None:
        """Say where this rank stands from now on ("round 3: inner phase"); all ranks enter the same places in turn.
        Raises a PeerFailedError where another rank is lost, and this one is to go on without it."""
        self._contact.check()
        self._place, self._stage = place, self._stage + 1

    @contextmanager
    def silent(self, place: str) -> Iterator[None]:
        """Announce that this rank may be silent for any time while the block runs: something holds its interpreter.

        Nobody takes it for dead then; who waits for it does so for as long as collectives may take.
        """
        self._place, self._is_silent = place, True
        self._announced.wait(timeout=self._silence)
        try:
            yield
        finally:
            self._is_silent = False
            self._announced.clear()

    def close(self) -> None:
        """Stop beating: the run is over, or has failed, and nobody listens any more."""
        self._closing.set()
        self.stop.stirred.set()
        for thread in self._threads:
            thread.join(timeout=self._silence)

    def behind(self) -> list[str]:
        """The ranks that have not come as far as this one, with where they were last heard of; raises a RuntimeError
        where the store is gone."""
        ranks_behind = []
        for rank, host in enumerate(self.hosts):
            beat = json.loads(self._store.get(_key(rank)) or b"{}") if self._store.check([_key(rank)]) else {}
            if rank != self._rank and beat.get("stage", -1) < self._stage:
                ranks_behind.append(f"rank {rank} on {host} ({beat.get('place', 'never heard of')})")
        return ranks_behind

    def in_words(self) -> str:
        """Where this rank stands, and whom it waits for there; for reports while a run begins."""
        try:
            behind = self.behind()
        except RuntimeError:
            behind = []
        if not behind:
            return f"{self._place}: still at it"
        others = f" and {len(behind) - MAX_NAMED} more" if len(behind) > MAX_NAMED else ""
        return f"{self._place}: waiting for {', '.join(behind[:MAX_NAMED])}{others}"

    def _beat_on(self) -> None:
        clock = OwnClock(self._every)
        number = 0
        while not self._closing.is_set():
            number += 1
            try:
                try:
                    self._beat(number, clock)
                except RuntimeError as error:
                    if not is_timeout(error):
                        raise
                    # A call was late: the watch says how long that may last. The old connection may yet be answered.
                    self._store = own_client(self._store)
            except RuntimeError as error:
                self._end(f"rank 0 on {self.hosts[0]}, whose node holds the store: lost contact ({first_line(error)})")
            is_awaited = self.stop.held_at is not None and self.stop.last is None
            self.stop.stirred.wait(self._every / 10 if is_awaited else self._every)
            self.stop.stirred.clear()

    def _beat(self, number: int, clock: OwnClock) -> None:
        if self.stop.requested:
            self.stop.hold()
        held_at = self.stop.held_at
        place = {"stage": self._stage, "place": self._place, "silent": self._is_silent, "held_at": held_at}
        self._store.set(_key(self._rank), json.dumps({"number": number, **place}))
        if place["silent"]:
            self._announced.set()
        if held_at is not None:
            self._store.set(STOP, self.stop.asked.name)
        clock.tick()
        stop, last_event, failure, *beats = self._store.multi_get(self._keys)
        now = clock.tick()
        for rank, beat in zip(self._heard, beats, strict=True):
            if beat != self._heard[rank][0]:
                self._heard[rank] = beat, now
        self._answers += 1
        if stop and held_at is None:
            self.stop.hear(Ask[stop.decode()])
            self.stop.hold()  # and says so at once, which is what it sets
        if self._rank == 0 and held_at is not None and not last_event:
            last_event = self._agreed()
        if last_event and self.stop.last is None:
            first, second = json.loads(last_event)
            self.stop.agree((first, second))
        if failure:
            self._end(failure.decode())
        for rank, (content, heard_at) in self._heard.items():
            patience = self._silence if content else max(self._silence, START_SECONDS)
            silence = now - max(heard_at, clock.resumed_at)
            if rank == self._rank or silence <= patience:
                continue
            beat = json.loads(content) if content else {"place": "never heard of", "silent": False}
            if not beat["silent"]:
                line = f"rank {rank} on {self.hosts[rank]}: silent for {silence:.0f} s ({beat['place']})"
                self._store.compare_set(FIRST_FAILURE, "", line)
                self._end(line)

    def _agreed(self) -> bytes:
        """The event after which all ranks end, on rank 0, and in the store: the last that one of them has begun, or for
        newcomers, the end of its round; empty as long as not all have said which that is."""
        held = [json.loads(content or b"{}").get("held_at") for content, _ in self._heard.values()]
        if None in held:
            return b""
        number, event = max(held)
        last = json.dumps([number, AT_THE_END if self.stop.asked is Ask.newcomers else event])
        self._store.set(LAST_EVENT, last)
        return last.encode()

    def _watch(self) -> None:
        clock = OwnClock(self._every)
        answers, answered_at = 0, 0.0
        while not self._closing.wait(self._every):
            now = clock.tick()
            if self._answers != answers:
                answers, answered_at = self._answers, now
            elif now - max(answered_at, clock.resumed_at) > self._silence + self._every:
                self._end(f"rank 0 on {self.hosts[0]}, whose node holds the store: silent for {self._silence:g} s")

    def _end(self, line: str) -> None:
        """Stop beating, for a rank is lost."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._contact.lose(line, self._place)


def _key(rank: int) -> str:
    return f"beat/{rank}"
