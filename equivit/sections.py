"""Sections of a configuration: a frozen dataclass declares the keys, with their types, defaults and comments.

    @dataclasses.dataclass(frozen=True)
    class LogConfig:
        every_steps: PositiveInt = 50
        to: tuple[str, ...] = ("tensorboard",)

A field may be another such dataclass: a subsection.  The defaults are `dataclasses.asdict(LogConfig())`; a run keeps
its values in a `ConfigDict`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from equivit import constraints


def types_of(section: type) -> dict[str, Any]:
    """Return the types of the keys (`constraints.py`); a mapping for a subsection."""
    types = constraints.types_of(section)
    is_section = {key: isinstance(type_, type) and dataclasses.is_dataclass(type_) for key, type_ in types.items()}
    return {key: types_of(type_) if is_section[key] else type_ for key, type_ in types.items()}


def check(prefix: str, section: ConfigDict, types: Mapping[str, Any]) -> None:
    """Raise ValueError unless every key of `types` has a value of its type."""
    for key, type_ in types.items():
        if isinstance(type_, Mapping):
            check(f"{prefix}.{key}", section[key], type_)
        else:
            constraints.check(f"{prefix}.{key}", section[key], type_)
