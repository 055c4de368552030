"""Types that declare the allowed values, and the check of a value against its type.

They annotate fields of models and of config sections (`sections.py`):

    drop_path: Below1 | tuple[Below1, Below1] = 0.0
    mlp_dim: PositiveInt | None = None

Types are numbers, bool, str, choices (`Literal`, `OneOf`), tuples, classes, and unions of these.  True and False are
not numbers, a float may be a whole number, a tuple may be a list, and a `tuple[str, ...]` has at least one entry.
"""

import dataclasses
import functools
import re
import types
import typing
from typing import Annotated, Any

from equivit import errors
from equivit.intervals import Interval

UNIONS = (typing.Union, types.UnionType)
NOUNS = {bool: "True or False", str: "a string", type(None): "None", tuple[()]: "()"}


class OneOf(tuple[Any, ...]):
    """The allowed values, given as a constant."""


class Words(str):
    """A description of the valid values for messages, in place of the one derived from the type."""


PositiveInt = Annotated[int, Interval(0, open="(", words="positive")]
NonNegativeInt = Annotated[int, Interval(0, words="zero or more")]
PositiveFloat = Annotated[float, Interval(0, open="(", words="positive")]
NonNegativeFloat = Annotated[float, Interval(0, words="zero or more")]
Share = Annotated[float, Interval(0, 1)]
Above0 = Annotated[float, Interval(0, 1, "(")]
Below1 = Annotated[float, Interval(0, 1, ")")]
Inside = Annotated[float, Interval(0, 1, "()")]
Depth = Annotated[int, Interval(1, 4096)]  # each block adds names of logical tensors to lists
Seed = Annotated[int, Interval(0, 2**32 - 1)]  # JAX reduces larger seeds modulo 2^32, so two seeds could coincide
Size = Annotated[tuple[PositiveInt, PositiveInt], Words("(height, width) in pixels")]


def check(thing: str, value: Any, type_: Any) -> None:
    """Raise ValueError, with the thing, the value, the rule and the nearest fix, unless `value` is of a type."""
    if allows(value, type_):
        return
    first = typing.get_args(type_)[0] if typing.get_origin(type_) in UNIONS else type_
    if typing.get_origin(first) is tuple and ... in typing.get_args(first) and isinstance(value, tuple | list):
        for entry in value:  # name only the entry that is not allowed
            check(thing, entry, typing.get_args(first)[0])
    rule = _rule(value, type_)
    verb = "is not" if rule.startswith("one of ") else "must be"
    raise ValueError(f"{thing}={errors.shown(value)} {verb} {rule}{_hint(value, type_)}.")


def check_fields(instance: Any, name: str) -> None:
    """Raise ValueError unless each field of a frozen dataclass has its type.

    Turns lists into hashable tuples, and NumPy's numbers into Python's.
    """
    for field, type_ in types_of(type(instance)).items():
        object.__setattr__(instance, field, value := _plain(getattr(instance, field)))
        check(f"{name}: {field}", value, type_)


def _plain(value: Any) -> Any:
    if type(value) in (list, tuple):  # a named tuple keeps its type
        return tuple(map(_plain, value))
    return value.item() if hasattr(value, "item") and not value.ndim else value


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def allows(value: Any, type_: Any) -> bool:
    """Return whether a value is of a type."""
    return any(_fits(value, kind) for kind in _kinds(type_))


def _kinds(type_: Any) -> list[Any]:
    """Split a union into its members, each an `Interval`, a `OneOf`, a class or a tuple of types."""
    origin, parts = typing.get_origin(type_), typing.get_args(type_)
    if origin in UNIONS:
        return [kind for part in parts for kind in _kinds(part)]
    if origin is Annotated:
        *base, note = parts  # the last note applies to the type with all earlier notes
        if isinstance(note, Words):
            return _kinds(Annotated[tuple(base)] if len(base) > 1 else base[0])
        return [note.integers() if isinstance(note, Interval) and base == [int] else note]
    if origin is typing.Literal:
        return [OneOf(parts)]
    return [{int: Interval(words="finite").integers(), float: Interval(words="finite")}.get(type_, type_)]


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, Interval):
        return value in kind
    if isinstance(kind, OneOf):
        return errors.is_one_of(value, kind)
    if typing.get_origin(kind) is not tuple:
        return kind is Any or isinstance(value, kind)
    types_ = typing.get_args(kind)
    if ... in types_ and isinstance(value, tuple | list):
        types_ = types_[:1] * max(len(value), 1)
    return isinstance(value, tuple | list) and len(types_) == len(value) and all(map(allows, value, types_))


def _rule(value: Any, type_: Any) -> str:
    """Describe the valid values in a message about `value`."""
    origin, parts = typing.get_origin(type_), typing.get_args(type_)
    if origin is Annotated and isinstance(parts[-1], Words):
        return parts[-1]
    if origin in UNIONS:
        return ", or ".join(_rule(value, part) for part in parts)
    (kind,) = _kinds(type_)
    if isinstance(kind, Interval):
        return kind.rule(value)
    if isinstance(kind, OneOf):
        return f"one of {errors.listed(kind)}"
    if origin is tuple and parts:
        several = re.sub(r"^a (.*?number|string|\w+$)", r"\1s", _rule(None, parts[0])).removeprefix("one ")
        return f"{'one or more' if ... in parts else ('one', 'two', 'three')[len(parts) - 1]} {several}"
    return NOUNS.get(kind) or f"a {kind.__name__}"


def _hint(value: Any, type_: Any) -> str:
    """Explain why a number is not valid, or name the nearest valid value; "" if neither is known."""
    why = [kind.hint(value) for kind in _kinds(type_) if isinstance(kind, Interval)]
    near = _nearest(value, type_)
    if any(why) or near is None:
        return next(filter(None, why), "")
    return f", such as {near}" if isinstance(near, tuple) else f"; the nearest is {near!r}"


def _nearest(value: Any, type_: Any) -> Any:
    """Return the nearest valid value, or None."""
    for kind in _kinds(type_):
        near, parts = None, [part for part in typing.get_args(kind) if part is not ...]
        if isinstance(kind, Interval):
            near = kind.nearest(value)
        elif isinstance(kind, OneOf):
            names = errors.near(str(value), map(str, kind), 1)
            near = next((known for known in kind if [str(known)] == names), None)
        elif parts:
            entries = value if isinstance(value, tuple | list) else (value,)
            entries = entries * len(parts) if len(entries) == 1 else entries
            near = tuple(e if allows(e, t) else _nearest(e, t) for e, t in zip(entries, parts, strict=False))
        if near is not None and _fits(near, kind):
            return near
    return None
