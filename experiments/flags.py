"""Command-line flags that several scripts share."""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from equivit import errors


def parser(description: str, script: str) -> argparse.ArgumentParser:
    """The parser of a script, by its docstring and its `__file__`; results go into a JSON file beside the script."""
    flags = argparse.ArgumentParser(description=description.split("\n")[0])
    beside = pathlib.Path(script).with_suffix(".json")
    flags.add_argument("--output", type=pathlib.Path, default=beside, help="JSON file of the results")
    flags.add_argument("--entry", default="main", help="entry of that file that is written (%(default)s)")
    return flags


def timing_parser(description: str, script: str, *, runs: int = 100, warmup: int = 10, minutes: float | None = 7):
    """`parser` with flags for timing; the defaults follow octic ViTs, Appendix D.4.

    `minutes` is None for a script that times all its variants in turn, and so has no `timing.Budget`.
    """
    flags = parser(description, script)
    flags.add_argument("--runs", type=at_least(1), default=runs, help="timed rounds (%(default)s)")
    flags.add_argument("--warmup", type=at_least(0), default=warmup, help="rounds before them (%(default)s)")
    if minutes is not None:
        note = "start nothing that would not finish within this time (%(default)s)"
        flags.add_argument("--minutes", type=at_least(0, float), default=minutes, help=note)
    return flags


def run(main: Callable[[Any], int], arguments) -> int:
    """The exit status of the `main` of a script; errors about its input are one line on stderr and status 1."""
    try:
        return main(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {errors.line(str(error))}", file=sys.stderr)
        return 1


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of a flag that lists some of the known words, separated by commas."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        return words

    return parse


def at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The type of a flag that is a number of a kind, and not smaller."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not value >= least:
            noun = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text} must be a {noun}, at least {least}")
        return value

    return parse


def each_at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], list[float]]:
    """The type of a flag that lists such numbers, separated by commas."""
    parse = at_least(least, kind)
    return lambda text: [parse(word) for word in text.split(",")]
