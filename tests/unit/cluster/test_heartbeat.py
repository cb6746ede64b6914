"""Whether a silent rank is found, however many ranks there are: with a clock and a store that are made up."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest

from adloco_dist.cluster import heartbeat
from adloco_dist.cluster.heartbeat import Heartbeat, OwnClock
from adloco_dist.cluster.signals import StopRequest

CALL_SECONDS = 0.0015
"""Of a call to the store, as measured on a busy machine."""
BEAT_SECONDS, SILENCE_SECONDS = 0.5, 15.0


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class SlowStore:
    """A store each call to which takes its time."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.values: dict[str, bytes] = {}
        self.num_calls = 0

    def _call(self, seconds: float = CALL_SECONDS) -> None:
        self._time.now += seconds
        self.num_calls += 1

    def clone(self) -> "SlowStore":
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self._call()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._call()
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._call(CALL_SECONDS + 1e-6 * len(keys))
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        self._call()
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self._call()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = value.encode()


class EndedError(Exception):
    """A rank would have ended its process."""


class Pool:
    """Rank 0, and as many others, which beat without fail but for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
        def end(self: Heartbeat, line: str) -> None:
            raise EndedError(line)

        self.time = Time()
        self.store: Any = SlowStore(self.time)
        self.num_ranks, self.number = num_ranks, 0
        monkeypatch.setattr(heartbeat, "time", self.time)
        monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
        monkeypatch.setattr(Heartbeat, "_end", end)
        self.beats = Heartbeat(self.store, 0, num_ranks, BEAT_SECONDS, SILENCE_SECONDS, StopRequest())
        self.beats.hosts = [f"host{rank}" for rank in range(num_ranks)]
        self.clock = OwnClock(BEAT_SECONDS)

    def pass_on(self, silent: int | None = None) -> None:
        """One beat of everybody but for the silent rank."""
        self.number += 1
        for rank in range(1, self.num_ranks):
            if rank != silent:
                beat = {"number": self.number, "stage": 1, "place": "round 3", "silent": False}
                self.store.values[f"beat/{rank}"] = json.dumps(beat).encode()
        self.beats._beat(self.number, self.clock)
        self.time.now += BEAT_SECONDS


@pytest.mark.parametrize("num_ranks", [2, 64, 2048])
def test_a_silent_rank_is_found_among_any_number(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """To ask 2,048 ranks one by one takes six seconds; a clock that counts that as standing still never sees anybody
    silent."""
    pool = Pool(monkeypatch, num_ranks)
    for _ in range(3):
        pool.pass_on()
    before = pool.time.now
    with pytest.raises(EndedError, match=r"rank 1 on host1: silent for 1\d s \(round 3\)"):
        for _ in range(100):
            pool.pass_on(silent=1)
    assert SILENCE_SECONDS - 1 < pool.time.now - before < SILENCE_SECONDS + 5


def test_a_beat_takes_no_more_calls_to_the_store_for_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for num_ranks in (8, 512):
        pool = Pool(monkeypatch, num_ranks)
        pool.pass_on()
        before = pool.store.num_calls
        pool.pass_on()
        calls.append(pool.store.num_calls - before)
    assert calls[0] == calls[1]


def test_ranks_that_were_never_heard_of_are_found_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 2048)
    with pytest.raises(EndedError, match=r"rank 2047 on host2047: silent for 12\d s \(never heard of\)"):
        for _ in range(400):
            pool.pass_on(silent=2047)


def test_time_in_which_a_process_stood_still_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 8)
    pool.pass_on()
    pool.time.now += 3600  # stopped, and everybody with it
    for _ in range(25):
        pool.pass_on(silent=1)
    with pytest.raises(EndedError, match=r"rank 1 on host1: silent for 1\d s"):
        for _ in range(10):
            pool.pass_on(silent=1)
