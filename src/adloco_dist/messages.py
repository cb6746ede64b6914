"""Typed values as plain JSON values and back: what ranks send each other, and what a run keeps in its files.

The JSON itself is Python's, in which infinities survive.
"""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A dataclass, or anything that holds some, as dictionaries with text for keys, lists and plain values."""
    return msgspec.to_builtins(value, str_keys=True)


def decode(kind: type[T], message: object) -> T:
    """The value of type `kind` that `message` was encoded from.

    An integer is taken for a float unless it is too large for one; nothing else is converted. Fields that the type does
    not have are ignored.

    Raises:
        ValueError: the message is of another type; the error names the field.
    """
    return msgspec.convert(message, kind, str_keys=True)
