"""The runs of a sweep: every combination of the values in lists such as "schedule.lr=1e-3,3e-4"."""

import itertools
from collections.abc import Sequence

from equivit import errors


def runs(lists: Sequence[str]) -> dict[str, list[str]]:
    """The changes `key=value` of each run, by its name.

        runs(["schedule.lr=1e-3,3e-4", "seed=0"])
        {"lr=1e-3,seed=0": ["schedule.lr=1e-3", "seed=0"], "lr=3e-4,seed=0": ["schedule.lr=3e-4", "seed=0"]}

    Raises ValueError for a key without values, a key or a value that occurs twice, or two runs with the same name.
    """
    values = {}
    for text in lists:
        key, _, rest = text.partition("=")
        found = _split(rest)
        if not all(found):
            raise ValueError(f"--sweep.{text}: give values separated by commas, such as --sweep.{key}=VALUE,VALUE.")
        if key in values or len(set(found)) < len(found):
            raise ValueError(f"--sweep.{text}: a {'key' if key in values else 'value'} occurs twice; give it once.")
        values[key] = found
    short = [key.rpartition(".")[2] for key in values]
    names = [last if short.count(last) == 1 else key for key, last in zip(values, short, strict=True)]
    result = {}
    for combination in itertools.product(*values.values()):
        name = ",".join(f"{name}={value}" for name, value in zip(names, combination, strict=True))
        if (name := name.replace("/", "_")) in result:
            raise ValueError(
                f"--sweep: two runs have the directory {errors.shown(name)}, in which / becomes _; give one of them "
                "in a sweep with another --workdir."
            )
        result[name] = [f"{key}={value}" for key, value in zip(values, combination, strict=True)]
    return result


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets: "(32,32),(64,64)" has two values."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
