"""Values that came out of a file, against the types that the program names for them."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

NOT_UNDERSTOOD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What decoding a value of any shape can raise."""
MOST_CHARACTERS = 60


def check(value: object, kind: Any, name: str = "") -> None:
    """Compare a value, with all that it holds, with a type.

    Knows dataclasses, typed dictionaries, containers, unions and plain types. An `int` is a `float` unless it is too
    large for one; a `bool` is no number.

    Args:
        name: of the value, for the error.

    Raises:
        ValueError: what does not fit, and what is needed.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin in (Union, UnionType):
        _check_any_of(value, arguments, name)
    elif is_typeddict(kind):
        _check_typed_dict(value, kind, name)
    elif isinstance(kind, type) and is_dataclass(kind):
        _demand(isinstance(value, kind), value, kind, name)
        for field, hint in get_type_hints(kind).items():
            check(getattr(value, field), hint, _within(name, field))
    elif origin is tuple and arguments[-1] is not Ellipsis:
        _demand(isinstance(value, list | tuple) and len(value) == len(arguments), value, kind, name)
        assert isinstance(value, list | tuple)
        for place, (item, hint) in enumerate(zip(value, arguments, strict=True)):
            check(item, hint, _within(name, place))
    elif origin in (list, tuple, Sequence):
        _demand(isinstance(value, list | tuple), value, kind, name)
        assert isinstance(value, list | tuple)
        for place, item in enumerate(value):
            check(item, arguments[0], _within(name, place))
    elif origin is frozenset:
        _demand(isinstance(value, AbstractSet), value, kind, name)
        assert isinstance(value, AbstractSet)
        for item in value:
            check(item, arguments[0], name)
    elif origin in (dict, Mapping):
        _demand(isinstance(value, Mapping), value, kind, name)
        assert isinstance(value, Mapping)
        for key, item in value.items():
            check(key, arguments[0], name)
            check(item, arguments[1], _within(name, key))
    else:
        _demand(_is_plain(value, kind), value, kind, name)


def _check_any_of(value: object, kinds: Sequence[Any], name: str) -> None:
    """Of several kinds, the error of the last is told."""
    if value is None and type(None) in kinds:
        return
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            check(value, kind, name)
            return
        except ValueError:
            pass
    check(value, rest[-1], name)


def _check_typed_dict(value: object, kind: Any, name: str) -> None:
    _demand(isinstance(value, dict), value, dict, name)
    assert isinstance(value, dict)
    for field, hint in get_type_hints(kind).items():
        if field in value:
            check(value[field], hint, _within(name, field))
        elif field in kind.__required_keys__:
            raise ValueError(f"has no {_within(name, field)}")


def _is_plain(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _fits_a_float(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _fits_a_float(value: float) -> bool:
    try:
        return math.isfinite(value) or isinstance(value, float)
    except OverflowError:  # an integer with more digits than a float has
        return False


def _demand(fits: bool, value: object, kind: Any, name: str) -> None:
    if not fits:
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        wanted = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{name + ' ' if name else ''}is {shown[:MOST_CHARACTERS]}, not of type {wanted}")


def _within(name: str, field: object) -> str:
    return f"{name}.{field}" if name else str(field)
