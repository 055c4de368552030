"""The tiles that were fastest on a card: `tiles.json`, which `experiments.benchmarks.hopper_tiles` writes."""

import functools
import json
import pathlib

PATH = pathlib.Path(__file__).with_name("tiles.json")


def key(kernel: str, *sizes: int | str) -> str:
    """The name under which the tile of a kernel is stored."""
    return " ".join(map(str, (kernel, *sizes)))


def tile(kernel: str, *sizes: int | str) -> tuple[int, ...] | None:
    """The numbers of the fastest tile; None if no card has tried."""
    found = _table().get(key(kernel, *sizes))
    return None if found is None else tuple(found)


@functools.cache
def _table() -> dict[str, list[int]]:
    return json.loads(PATH.read_text())["main"]["tiles"] if PATH.is_file() else {}
