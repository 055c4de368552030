"""Rules for the values of a config, and what is said when one is broken."""

import difflib
from collections.abc import Iterable
from typing import Any

RULES = {
    "in [0, 1]": lambda v: 0 <= v <= 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in (0, 1)": lambda v: 0 < v < 1,
    "positive": lambda v: v > 0,
    "zero or more": lambda v: v >= 0,
}


def one_of(key: str, value: Any, known: Iterable[str]) -> None:
    """ValueError unless `config.<key>` is one of the known names; the message gives the nearest."""
    if value not in known:
        raise ValueError(f"config.{key}={value!r} is not one of {', '.join(known)}{nearest(str(value), known)}.")


def number(key: str, value: Any, rule: str) -> None:
    """ValueError unless `config.<key>` is a number that follows one of RULES."""
    if not is_number(value) or not RULES[rule](value):
        raise ValueError(f"config.{key}={value!r} must be {rule}.")


def whole(key: str, value: Any) -> None:
    """ValueError unless `config.<key>` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.{key}={value!r} must be a positive whole number.")


def is_number(value: Any) -> bool:
    """Whether a value is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; the nearest is 'x'", or nothing where no known name is near."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is '{match[0]}'" if match else ""
