"""Damages that keep structure: of bytes, JSON and lines of text."""

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

# fmt: off
NUMBERS = (
    0, 1, -1, 2, 7, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 0.5, -0.0, 1e308, math.nan, math.inf, True, False,
)
# fmt: on
INTEGERS = tuple(n for n in NUMBERS if type(n) is int)
# fmt: off
TEXTS = (
    "", " ", "a", "\u00e9", "e\u0301", "\0", "a\nb", "a\tb", "a\u2028b", "a\x85b", "a\x0bb", "\ud800", "\ufeff",
    "\u202e", "../../x", "/etc/passwd", "~", "~nobody", "{split}", "{}", "%s", "\x1b[2J", "NaN", "1e400",
    "\u0967\u0968", "\u00b2", "01", "1", "--", "None", "a" * 300, "b" * 20000, "train", "[0]", "a/b", "x.png", "image",
    "label",
)
# fmt: on
# What stands in JSON as it is.
# fmt: off
TOKENS = (
    "1e400", "1" * 5000, "-", "nul", "'a'", '"\\ud800"', "", "[" * 100_000, '{"a":' * 50_000, "[" * 500 + "]" * 500,
)
# fmt: on


def rearrange(draw: st.DrawFn, parts: list, k: int, kind: str) -> None:
    """Drop, double or move part k of a list in place; other kinds change nothing."""
    if kind == "drop" and len(parts) > 1:
        del parts[k]
    elif kind == "double":
        parts.insert(k, parts[k])
    elif kind == "move":
        parts.insert(draw(st.integers(0, len(parts) - 1)), parts.pop(k))


def values(*more: Any) -> st.SearchStrategy:
    """JSON values of all types, and those given."""
    return st.sampled_from(
        (*more, *NUMBERS, *TEXTS, None, [], {}, [[]], [1], {"a": 1}, [1] * 1000, *map(Token, TOKENS))
    )


@st.composite
def damaged(draw, content: bytes, most: int = 3) -> bytes:
    """The bytes with parts changed, cut, doubled or left out."""
    for _ in range(draw(st.integers(1, most))):
        at, size = draw(st.integers(0, len(content))), draw(st.sampled_from((1, 2, 4, 8, 40)))
        kind = draw(st.sampled_from(("number", "bits", "cut", "drop", "double", "insert")))
        before, here, after = content[:at], content[at : at + size], content[at + size :]
        if kind == "number":
            number, order = draw(st.sampled_from(INTEGERS)), draw(st.sampled_from(("little", "big")))
            here = (number % 256**size).to_bytes(size, order)
        elif kind == "bits" and here:
            here = bytes([here[0] ^ draw(st.integers(1, 255))]) + here[1:]
        elif kind == "cut":
            here, after = b"", b""
        elif kind == "drop":
            here = b""
        elif kind == "double":
            here = here * 2
        else:
            here = draw(st.sampled_from((b"\0", b"\xff", b"\xed\xa0\x80", b"\n", bytes(9)))) + here
        content = before + here + after
    return content


class Token(str):
    """A JSON token without quotes."""


class Items(list):
    """An object of JSON as (key, value) pairs, of which keys may be equal."""


@st.composite
def document(draw, value: Any, most: int = 3, more: tuple = ()) -> bytes:
    """JSON like that of a value, with entries changed, moved, doubled or left out, now and then in another encoding."""
    tree = [_items(value)]
    for _ in range(draw(st.integers(0, most))):
        _change(draw, tree, more)
    text = dumped(tree[0] if tree else Token(""))
    content = text.encode(draw(st.sampled_from(("utf-8",) * 8 + ("utf-8-sig", "utf-16", "latin-1"))), "replace")
    return draw(damaged(content, 1)) if draw(st.integers(0, 7)) == 7 else content


def dumped(value: Any) -> str:
    """As `json.dumps`, with tokens and equal keys."""
    if isinstance(value, Items):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumped(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumped, value)) + "]"
    return str(value) if isinstance(value, Token) else json.dumps(value)


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return Items((key, _items(item)) for key, item in value.items())
    return [_items(item) for item in value] if isinstance(value, list | tuple) else value


def _places(tree: list) -> list[tuple[list, int]]:
    """Each entry of a tree, as a list and the position in it."""
    found = []
    for k, entry in enumerate(tree):
        found.append((tree, k))
        value = entry[1] if isinstance(tree, Items) else entry
        if isinstance(value, list):
            found += _places(value)
    return found


def _change(draw, tree: list, more: tuple) -> None:
    """Change one entry of a tree in its place."""
    if not (places := _places(tree)):
        return
    where, k = draw(st.sampled_from(places))
    entry, kind = where[k], draw(st.sampled_from(("value",) * 4 + ("drop", "double", "key", "move", "like")))
    put = (lambda value: (entry[0], value)) if isinstance(where, Items) else lambda value: value
    old = entry[1] if isinstance(where, Items) else entry
    if kind == "drop":
        del where[k]
    elif kind == "double":
        where.insert(draw(st.integers(0, len(where))), copy.deepcopy(entry))
    elif kind == "key" and isinstance(where, Items):
        keys = [key for key, _ in where] + [key for key in more if isinstance(key, str)]
        where[k] = (draw(st.sampled_from((*keys, *TEXTS))), old)
    elif kind == "move":
        other, j = draw(st.sampled_from(places))
        if j < len(other):
            where[k] = put(copy.deepcopy(other[j][1] if isinstance(other, Items) else other[j]))
    elif kind == "like" and isinstance(old, int | float | str | list) and not isinstance(old, bool):
        where[k] = put(draw(st.sampled_from(_like(old))))
    else:
        where[k] = put(_items(draw(values(*more))))  # a copy, as later changes are made in place


def _like(value: Any) -> list:
    """Values of the same type that are a little wrong."""
    if isinstance(value, str):
        return [value + "x", value[:-1], value.upper(), value + "\0", value * 2, f"./{value}", value + " "]
    if isinstance(value, list):
        return [type(value)(value * 2), type(value)(value[:-1]), type(value)(value[::-1]), [value]]
    return [-value, value + 1, value - 1, value * 2, float(value), value / 2, str(value), value * 1_000_003]


@st.composite
def lines(draw, rows: list[list[str]], separator: str, more: tuple[str, ...] = ()) -> bytes:
    """Text of lines of cells, some of them changed, doubled or left out; at times with other separators or ends."""
    rows = [list(row) for row in rows]
    for _ in range(draw(st.integers(0, 4))):
        if not rows:
            break
        k, cell = draw(st.integers(0, len(rows) - 1)), draw(st.sampled_from((*TEXTS, *more)))
        at, kind = (
            draw(st.integers(0, 9)),
            draw(st.sampled_from(("cell", "cell", "cell", "glue", "more", "drop", "double", "line"))),
        )
        if kind == "cell" and rows[k]:
            rows[k][at % len(rows[k])] = cell
        elif kind == "glue" and rows[k]:
            rows[k][at % len(rows[k])] += cell
        elif kind == "more":
            rows[k].insert(at, cell)
        elif kind == "drop" and rows[k]:
            del rows[k][at % len(rows[k])]
        elif kind == "double":
            rows.insert(k, rows[k])
        else:
            rows[k] = [cell]
    separator = draw(st.sampled_from((separator,) * 9 + (",", ";", "\t", " ", ":", "")))
    end = draw(st.sampled_from(("\n",) * 9 + ("\r\n", "\r", "\u2028", "\x0c")))
    encoding = draw(st.sampled_from(("utf-8",) * 9 + ("utf-8-sig", "utf-16", "latin-1")))
    content = end.join(separator.join(row) for row in rows).encode(
        encoding, "surrogatepass" if encoding != "latin-1" else "replace"
    )
    return draw(damaged(content, 1)) if draw(st.integers(0, 5)) == 5 else content


@st.composite
def one_of_files(draw, files: dict[str, bytes], damages: dict[str, Any]) -> dict[str, bytes]:
    """The files with one or two of them damaged, or one left out; `damages` has the strategy of each."""
    files = dict(files)
    for name in sorted(draw(st.sets(st.sampled_from(sorted(damages)), min_size=1, max_size=2))):
        files[name] = draw(damages[name])
    if len(files) > 1 and draw(st.integers(0, 15)) == 15:
        del files[draw(st.sampled_from(sorted(files)))]
    return files
