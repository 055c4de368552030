"""Checks of single values.  A message names the thing, its value, the rule and the nearest fix."""

import difflib
from collections.abc import Iterable
from typing import Any

RULES = {
    "in [0, 1]": lambda v: 0 <= v <= 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in (0, 1)": lambda v: 0 < v < 1,
    "in (0, 1]": lambda v: 0 < v <= 1,
    "positive": lambda v: v > 0,
    "zero or more": lambda v: v >= 0,
}


def one_of(thing: str, value: Any, known: Iterable[Any]) -> None:
    """ValueError unless `value` is one of the known ones; the message gives the nearest."""
    if value not in (known := list(known)):
        raise ValueError(f"{thing}={value!r} is not one of {', '.join(map(str, known))}{nearest(value, known)}.")


def number(thing: str, value: Any, rule: str, *, optional: bool = False) -> None:
    """ValueError unless `value` is a number that follows one of RULES; `optional` allows None too."""
    if optional and value is None:
        return
    if not is_number(value) or not RULES[rule](value):
        raise ValueError(f"{thing}={value!r} must be {rule}{', or None' if optional else ''}.")


def whole(thing: str, value: Any, rule: str = "positive", *, optional: bool = False) -> None:
    """ValueError unless `value` is a whole number that follows one of RULES; `optional` allows None too."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not RULES[rule](value):
        kind = "a positive whole number" if rule == "positive" else f"a whole number, {rule}"
        raise ValueError(f"{thing}={value!r} must be {kind}{', or None' if optional else ''}.")


def pair(thing: str, value: Any, rule: str) -> None:
    """ValueError unless `value` holds two numbers that both follow one of RULES."""
    if len(value) != 2 or not all(is_number(v) and RULES[rule](v) for v in value):
        raise ValueError(f"{thing}={value!r} must be two numbers {rule}.")


def is_number(value: Any) -> bool:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def nearest(value: Any, known: Iterable[Any]) -> str:
    """ "; the nearest is 'x'", or nothing where no known name is near."""
    match = difflib.get_close_matches(str(value), list(map(str, known)), n=1)
    return f"; the nearest is {match[0]!r}" if match else ""
