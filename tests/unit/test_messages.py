"""Typed values survive JSON, and what does not fit its type is refused by the name of its field."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from adloco_dist.messages import decode, encode


@dataclass(frozen=True)
class Inner:
    ratio: float
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Outer:
    inners: Mapping[int, Inner]
    members: frozenset[int] = frozenset()
    name: str | None = None
    sizes: list[int | None] = field(default_factory=list)


VALUE = Outer({3: Inner(math.inf, ((0, 1), (2, 3)))}, frozenset({1, 2}), None, [None, 4])


def test_a_value_survives_json() -> None:
    message = json.loads(json.dumps(encode(VALUE)))
    assert decode(Outer, message) == VALUE
    assert decode(Outer, encode(VALUE)) == VALUE, "rank 0 decodes what it did not send"
    assert math.isnan(decode(Inner, json.loads(json.dumps(encode(Inner(math.nan))))).ratio)


def test_whole_numbers_are_taken_for_floats() -> None:
    ratio = decode(Inner, {"ratio": 2}).ratio
    assert (ratio, type(ratio)) == (2.0, float)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ([], "object"),
        ({}, "inners"),
        ({"inners": {"x": {"ratio": 1.0}}}, r"\$.inners"),
        ({"inners": {"3": {"ratio": "1"}}}, r"\$.inners\[...\].ratio"),
        ({"inners": {"3": {"ratio": True}}}, r"\$.inners\[...\].ratio"),
        ({"inners": {"3": {"ratio": 10**400}}}, r"\$.inners\[...\].ratio"),
        ({"inners": {"3": {"ratio": 1.0, "pairs": [[1, 2, 3]]}}}, r"\$.inners\[...\].pairs\[0\]"),
        ({"inners": {}, "members": [1.5]}, r"\$.members\[0\]"),
        ({"inners": {}, "name": 3}, r"\$.name"),
        ({"inners": {}, "sizes": None}, r"\$.sizes"),
    ],
)
def test_another_type_is_refused_by_the_name_of_its_field(message: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        decode(Outer, message)
    assert "\n" not in str(caught.value)


THREADS = """
import dataclasses, sys, threading
from adloco_dist.messages import decode
sys.setswitchinterval(1e-6)
for number in range(1000):
    inner = dataclasses.make_dataclass(f"Inner{number}", [("numbers", dict[str, int])])
    outer = dataclasses.make_dataclass(f"Outer{number}", [(f"field{place}", inner | None, None) for place in range(8)])
    together = threading.Barrier(4)
    def read():
        together.wait()
        decode(outer, {"field0": {"numbers": {"one": 1}}})
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_be_the_first_to_read_a_type_together() -> None:
    """With msgspec 0.22 alone, they crash within a few hundred types."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
