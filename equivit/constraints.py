"""Types that say which values are allowed, and the check of a value against its type.

A dataclass states them where its fields are, a section of a configuration in the `TYPES` beside its `DEFAULTS`:

    width: PositiveInt
    drop_path: Below1 | tuple[Below1, Below1] = 0.0
    mlp_dim: PositiveInt | None = None

Known are numbers, bool, str, choices (`Literal`, `OneOf`), tuples, classes, and unions of these.  True and False are no
numbers, a whole number may stand for a float, and a list for a tuple; a `tuple[str, ...]` has at least one entry.
Models compute in float32, so a float must hold there too: 1e-50 is not positive, and 1e39 is not finite.  Whole numbers
are at most 2^31 - 1: steps, sizes and indices are int32.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
from ml_collections import ConfigDict

from equivit import errors

LARGEST_INT = 2**31 - 1
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
COUNTS = ("no", "one", "two", "three")


@dataclasses.dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`.

    Attributes:
      open: "(" where `low` is not among them, ")" where `high` is not, "()" where neither is.
      words: in place of "in [0, 1]".
    """

    low: float = -math.inf
    high: float = math.inf
    open: str = ""
    words: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if "(" in self.open else value >= self.low
        return above and (value < self.high if ")" in self.open else value <= self.high)

    def __str__(self) -> str:
        left, right = "(" if "(" in self.open else "[", ")" if ")" in self.open else "]"
        return self.words or f"in {left}{self.low}, {self.high}{right}"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The known values, where they stand in a constant."""

    known: tuple[Any, ...]

    def __init__(self, known: Iterable[Any]):
        object.__setattr__(self, "known", tuple(known))


@dataclasses.dataclass(frozen=True)
class Words:
    """The words with which a message describes valid values, in place of those derived from the type."""

    words: str


PositiveInt = Annotated[int, Interval(0, open="(", words="positive")]
NonNegativeInt = Annotated[int, Interval(0, words="zero or more")]
PositiveFloat = Annotated[float, Interval(0, open="(", words="positive")]
NonNegativeFloat = Annotated[float, Interval(0, words="zero or more")]
Share = Annotated[float, Interval(0, 1)]
Above0 = Annotated[float, Interval(0, 1, "(")]
Below1 = Annotated[float, Interval(0, 1, ")")]
Inside = Annotated[float, Interval(0, 1, "()")]
Depth = Annotated[int, Interval(1, 4096)]  # a logical tensor has a name in each block, and they are listed
Seed = Annotated[int, Interval(0, 2**32 - 1)]  # JAX takes larger ones modulo 2^32, so that two would be one
Size = Annotated[tuple[PositiveInt, PositiveInt], Words("(height, width) in pixels")]


def check(thing: str, value: Any, type_: Any) -> None:
    """ValueError unless `value` is of a type; the message names the thing, the value, the rule and the nearest fix."""
    kind = _kind(type_)
    if kind.allows(value):
        return
    value, kind = kind.culprit(value)
    raise ValueError(f"{thing}={errors.shown(value)} {kind.refusal(value)}{kind.hint(value)}.")


def allows(value: Any, type_: Any) -> bool:
    """Whether a value is of a type."""
    return _kind(type_).allows(value)


def check_section(prefix: str, section: ConfigDict, types_: Mapping[str, Any]) -> None:
    """ValueError unless every key of `types_` has a value of its type; a mapping in it is a section in the section."""
    for key, type_ in types_.items():
        if isinstance(type_, Mapping):
            check_section(f"{prefix}.{key}", section[key], type_)
        else:
            check(f"{prefix}.{key}", section[key], type_)


def check_fields(instance: Any, name: str) -> None:
    """ValueError unless every field of a frozen dataclass is of its type; lists become tuples, which have a hash."""
    for field, type_ in types_of(type(instance)).items():
        if isinstance(value := getattr(instance, field), list):
            object.__setattr__(instance, field, value := tuple(value))
        check(f"{name}: {field}", value, type_)


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


class _Kind:
    """The values that a type allows, and their description in a message.  This class is for classes, bool and str."""

    NOUNS: typing.ClassVar = {bool: ("True or False", "True or False"), str: ("a string", "strings")}

    def __init__(self, of: Any):
        self.of = of

    def allows(self, value: Any) -> bool:
        return self.of is Any or isinstance(value, self.of)

    def nouns(self, value: Any) -> tuple[str, str]:
        """One of the kind, and several; `value` is what is there instead."""
        name = getattr(self.of, "__name__", "value")
        return self.NOUNS.get(self.of, (f"a {name}", f"{name}s"))

    def refusal(self, value: Any) -> str:
        return f"must be {self.nouns(value)[0]}"

    def hint(self, value: Any) -> str:
        """A further hint, such as the nearest valid value."""
        return ""

    def repaired(self, value: Any) -> Any:
        """The nearest value that is allowed, or None."""
        return None

    def culprit(self, value: Any) -> "tuple[Any, _Kind]":
        """The part of a value that is not allowed, and its kind."""
        return value, self


class _Number(_Kind):
    """Whole numbers, or numbers, of an interval."""

    def __init__(self, of: type, interval: Interval):
        super().__init__(of)
        self.interval = interval
        top = LARGEST_INT if of is int else LARGEST
        self.low, self.high = max(interval.low, -top), top if interval.high == math.inf else interval.high

    def allows(self, value: Any) -> bool:
        if not errors.is_number(value) or (self.of is int and not isinstance(value, int)):
            return False
        if not self.low <= value <= self.high:  # NaN is not, and a huge int cannot be rounded
            return False
        if self.of is float and isinstance(value, int) and abs(value) > LARGEST_INT:  # an int32 in arithmetic
            return False
        return value in self.interval and (self.of is int or self._holds_in_float32(value))

    def _holds_in_float32(self, value: float) -> bool:
        rounded = _in_float32(value)
        return rounded in self.interval and bool(rounded) == bool(value)  # alphas and rates of 0 mean "never"

    def nouns(self, value: Any) -> tuple[str, str]:
        noun, rule = "whole number" if self.of is int else "number", str(self.interval)
        if self.of is float and errors.is_number(value):
            words = rule if abs(value) <= LARGEST or rule == "finite" else f"{rule} and finite"
            return words, words
        if " " not in rule:
            return f"a {rule} {noun}", f"{rule} {noun}s"
        comma = " " if rule.startswith("in ") else ", "
        return f"a {noun}{comma}{rule}", f"{noun}s{comma}{rule}"

    def hint(self, value: Any) -> str:
        if isinstance(value, bool):
            return f"; {value} is not a number"
        if self.of is float and errors.is_number(value) and value in self.interval and abs(value) < math.inf:
            if isinstance(value, int) and abs(value) <= LARGEST:
                return f"; write {float(value)}"
            return f"; in float32 it is {_in_float32(value):g}"
        near = self.repaired(value)
        return "" if near is None else f"; the nearest is {near}"

    def repaired(self, value: Any) -> Any:
        if not errors.is_number(value) or not abs(value) < math.inf:
            return None
        lowest = max(self.low, 1) if self.of is int and "(" in self.interval.open else self.low
        near = min(max(round(value) if self.of is int else value, lowest), self.high)
        return near if self.allows(near) else None


def _in_float32(value: float) -> float:
    """The value as float32 has it; what is smaller than its normal numbers counts as zero, as in a compiled program."""
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(np.float32(value)) if abs(value) >= SMALLEST else 0.0


class _Choice(_Kind):
    """Some known values."""

    def allows(self, value: Any) -> bool:
        return errors.is_one_of(value, self.of)

    def nouns(self, value: Any) -> tuple[str, str]:
        return f"one of {errors.listed(self.of)}", f"of {errors.listed(self.of)}"

    def refusal(self, value: Any) -> str:
        return f"is not {self.nouns(value)[0]}"

    def hint(self, value: Any) -> str:
        return errors.nearest(value, self.of)

    def repaired(self, value: Any) -> Any:
        near = errors.near(str(value), map(str, self.of), 1)
        return next((name for name in self.of if [str(name)] == near), None)


class _Tuple(_Kind):
    """Tuples with these entries; where it is open, of any number of entries of one kind, and at least one."""

    def __init__(self, of: tuple[_Kind, ...], is_open: bool):
        super().__init__(of)
        self.is_open = is_open

    def allows(self, value: Any) -> bool:
        if not isinstance(value, tuple | list) or (self.is_open and not value):
            return False
        kinds = self.of * len(value) if self.is_open else self.of
        return len(kinds) == len(value) and all(kind.allows(part) for kind, part in zip(kinds, value, strict=True))

    def nouns(self, value: Any) -> tuple[str, str]:
        if not self.of:
            return "()", "()"
        entries = self.of[0].nouns(None)[1]
        words = f"one or more {entries}" if self.is_open else f"{COUNTS[len(self.of)]} {entries}"
        return words, words

    def refusal(self, value: Any) -> str:
        return "must have an entry" if self.is_open and value in ((), []) else super().refusal(value)

    def hint(self, value: Any) -> str:
        near = self.repaired(value)
        return "" if near is None else f", such as {near}"

    def repaired(self, value: Any) -> Any:
        parts = value if isinstance(value, tuple | list) else (value,)
        if len(parts) == 1 and not self.is_open:
            parts *= len(self.of)
        if len(parts) != len(self.of):
            return None
        near = [part if kind.allows(part) else kind.repaired(part) for kind, part in zip(self.of, parts, strict=True)]
        return None if None in near else tuple(near)

    def culprit(self, value: Any) -> tuple[Any, _Kind]:
        if not self.is_open or not isinstance(value, tuple | list) or not value:
            return value, self
        return self.of[0].culprit(next(part for part in value if not self.of[0].allows(part)))


class _Union(_Kind):
    """Values of any of some kinds, and perhaps None."""

    def __init__(self, of: tuple[_Kind, ...], optional: bool):
        super().__init__(of)
        self.optional = optional

    def allows(self, value: Any) -> bool:
        return any(kind.allows(value) for kind in self.of) or (self.optional and value is None)

    def nouns(self, value: Any) -> tuple[str, str]:
        nouns = [kind.nouns(value)[0] for kind in self.of] + ["None"] * self.optional
        return ", or ".join(nouns), ", or ".join(nouns)

    def refusal(self, value: Any) -> str:
        others = [kind.nouns(value)[0] for kind in self.of[1:]] + ["None"] * self.optional
        return ", or ".join([self.of[0].refusal(value), *others])

    def hint(self, value: Any) -> str:
        return next(filter(None, (kind.hint(value) for kind in self.of)), "")

    def culprit(self, value: Any) -> tuple[Any, _Kind]:
        part, kind = self.of[0].culprit(value)
        return (part, kind) if kind is not self.of[0] else (value, self)


class _Described(_Kind):
    """Another kind, in words of its own."""

    def __init__(self, of: _Kind, words: str):
        super().__init__(of)
        self.words = words

    def allows(self, value: Any) -> bool:
        return self.of.allows(value)

    def nouns(self, value: Any) -> tuple[str, str]:
        return self.words, self.words

    def hint(self, value: Any) -> str:
        return self.of.hint(value)

    def repaired(self, value: Any) -> Any:
        return self.of.repaired(value)


@functools.cache
def _kind(type_: Any) -> _Kind:
    """The kind that a type stands for."""
    if typing.get_origin(type_) is Annotated:  # of several notes, the last one is about the type with the others
        base, *notes, last = type_.__origin__, *type_.__metadata__
        match last:
            case Interval():
                return _Number(base, last)
            case OneOf():
                return _Choice(last.known)
            case Words():
                return _Described(_kind(Annotated[base, *notes] if notes else base), last.words)
    entries = typing.get_args(type_)
    match typing.get_origin(type_):
        case typing.Literal:
            return _Choice(entries)
        case types.UnionType | typing.Union:
            members = tuple(_kind(entry) for entry in entries if entry is not type(None))
            return _Union(members, type(None) in entries)
        case origin if origin is tuple:
            is_open = ... in entries
            return _Tuple(tuple(_kind(entry) for entry in entries if entry is not ...), is_open)
    if type_ in (int, float):
        return _Number(type_, Interval(words="finite"))
    return _Kind(type_)
