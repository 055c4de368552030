"""Wording of messages: values, choices among names, and the nearest valid value.

`constraints.py` declares the valid values of fields.
"""

import contextlib
import difflib
import math
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 80  # characters of a value in a message
LONGEST_WORD = 400  # characters of a word, such as a path, in a line that a command prints
MOST = 16  # names in a list


def one_of(thing: str, value: Any, known: Iterable[Any]) -> None:
    """ValueError unless `value` is one of the known ones; the message gives the nearest."""
    known = list(known)
    if not is_one_of(value, known):
        raise ValueError(f"{thing}={shown(value)} is not one of {listed(known)}{nearest(value, known)}.")


def is_one_of(value: Any, known: Iterable[Any]) -> bool:
    """Whether a value is among the known ones; True is not 1, and 1.0 is neither."""
    return any(type(value) is type(name) and value == name for name in known)


def is_number(value: Any) -> bool:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """The value for a message, cut if long."""
    try:
        text = " ".join(repr(value).splitlines())
    except ValueError:  # Python does not print integers with thousands of digits
        return f"<an integer of {value.bit_length()} bits>" if isinstance(value, int) else f"<{type(value).__name__}>"
    return _cut(text, LONGEST)


def line(text: str) -> str:
    """The text on one line: control characters are escaped, and very long words are cut."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: _cut(word[0], LONGEST_WORD), text)


def word(text: str) -> str:
    """A name for a message: on one line, cut if long."""
    return _cut(line(text), LONGEST)


def brief(text: str) -> str:
    """A message of another library on one line, cut if long."""
    return _cut(line(text).rstrip(". "), LONGEST_WORD)


def reason(error: BaseException) -> str:
    """The type and the message of an error of another library."""
    return brief(f"{type(error).__name__}: {error}")


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]}... ({len(text)} characters)"


def listed(names: Iterable[Any]) -> str:
    """The names separated by commas; a long list shows the first names and the total."""
    names = [str(name) for name in names]
    return ", ".join(names) if len(names) <= MOST else f"{', '.join(names[: MOST // 2])}, ... ({len(names)} in all)"


def nearest(value: Any, known: Iterable[Any]) -> str:
    """ "; the nearest is 'x'", or "" if no known name is near."""
    found = near(str(value), map(str, known), 1)
    return f"; the nearest is {shown(found[0])}" if found else ""


def nearest_path(path: pathlib.Path) -> str:
    """The end of a message about a missing path: its missing directory, or the most similar name beside it, or ""."""
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent} either"
    with contextlib.suppress(PermissionError):
        return nearest(path.name, os.listdir(path.parent))
    return ""


def near(word: str, known: Iterable[str], most: int) -> list[str]:
    """The known words most similar to a word, most similar first; words that differ only in case come first."""
    known = list(known)
    if same := [other for other in known if other.lower() == word.lower()]:
        return same[:most]
    cutoff = 0.6 if len(word) > 3 else 0.5  # allows one wrong letter of two
    return difflib.get_close_matches(word[:LONGEST], known, n=most, cutoff=cutoff)


def divides(thing: str, value: int, whole: int, what: str) -> None:
    """ValueError unless `value` is positive and divides `whole`, which `what` names; the message gives the nearest."""
    if value < 1 or whole % value:
        near = _nearest_divisor(value, whole)
        raise ValueError(f"{thing}={value} must divide {what}; the nearest that does is {near}.")


def _nearest_divisor(value: int, whole: int) -> int:
    """The divisor of a positive number that is nearest to a value, the smaller on ties."""
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0] or [1]
    return min(sorted({*small, *(whole // n for n in small)}), key=lambda n: abs(n - value))


def sides(name: str, what: str, size: Sequence[int], units: Sequence[int], why: str) -> None:
    """ValueError unless height and width of `what` are multiples of these units; the message gives the nearest."""
    for axis, length, unit in zip(("height", "width"), size, units, strict=True):
        if length % unit:
            near = multiples(length, unit)
            raise ValueError(f"{name}: the {axis} {length} of {what} is not a multiple of {unit}, as {why}; {near}.")


def multiples(value: int, unit: int) -> str:
    """ "the nearest are 16 and 24": the positive multiples of `unit` around a value between them."""
    below = value // unit * unit
    return f"the nearest are {below} and {below + unit}" if below > 0 else f"the nearest is {unit}"
