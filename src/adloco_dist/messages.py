"""Typed values as plain JSON values and back: what ranks send each other, and what a run keeps in its files.

The JSON itself is Python's, in which infinities survive.
"""

import json
import math
import threading
from functools import cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Json = dict[str, Any]
"""An object of JSON."""
_looking = threading.Lock()


def encode(value: Any) -> Any:
    """A dataclass, or anything that holds some, as dictionaries with text for keys, lists and plain values."""
    return msgspec.to_builtins(value, str_keys=True)


def decode(kind: type[T], message: object) -> T:
    """The value of type `kind` that `message` was encoded from; raises a ValueError, which names the field, where the
    message is of another type.

    An integer is taken for a float unless it is too large for one; nothing else is converted. Fields that the type does
    not have are ignored.
    """
    _look_at(kind)
    return msgspec.convert(message, kind, str_keys=True)


@cache
def _look_at(kind: Any) -> None:
    """Let msgspec see what a type has, once: two threads that do so with one dataclass crash the process (0.22)."""
    with _looking:
        msgspec.json.Decoder(kind)


def strict_json(value: Any) -> Any:
    """`value` with null for numbers that JSON does not know (NaN, infinities)."""
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode_json(content: bytes) -> Any:
    """JSON that anybody may have written; raises a ValueError of one line where it is none. Numbers that JSON does not
    know, which Python writes all the same, are null."""
    try:
        value = json.loads(content.decode(), parse_constant=lambda _: None)
        if rb"\ud" in content.lower():  # half a character, which could not be shown
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ValueError("no UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error
    return value
