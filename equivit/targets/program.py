"""The text of a compiled program (HLO), as computations of instructions."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "token": 0}  # bytes; others have their bits in the name, as f32, s8, f8e4m3fn
ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


class Array(NamedTuple):
    """The type of an array."""

    dtype: str  # as XLA writes it: f32, bf16, s8
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size."""
        bits = re.search(r"[0-9]+", self.dtype)
        width = WIDTHS.get(self.dtype, -(-int(bits[0]) // 8) if bits else 0)
        return width * math.prod(self.shape)


class Instruction(NamedTuple):
    """One instruction."""

    name: str
    result: tuple[Array, ...]  # the arrays of the result, a tuple flattened
    opcode: str
    operands: tuple[str, ...]  # names of instructions
    arguments: str  # the text between the parentheses
    attributes: str  # the text after them

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return sum(array.bytes for array in self.result)

    def called(self, *keys: str) -> str | None:
        """The computation that an attribute names, such as `calls` or `body`."""
        found = re.search(rf"\b(?:{'|'.join(keys)})=%?([\w.\-]+)", self.attributes)
        return found and found[1]


Computation = dict[str, Instruction]  # by name, in the order of execution


class Program(NamedTuple):
    """A program."""

    computations: dict[str, Computation]
    entry: str  # the name of the first


def parse(text: str) -> Program:
    """Read the text of a scheduled program, `compiled.as_text()`."""
    computations, entry, current = {}, "", None
    for line in _lines(text):
        if head := HEAD.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    return Program(computations, entry)


def _lines(text: str) -> Iterator[str]:
    """Lines without comments such as /*index=5*/."""
    for line in text.splitlines():
        yield re.sub(r"/\*index=\d+\*/", "", line)


def _instruction(line: str) -> Instruction | None:
    name = NAME.match(line)
    if not name:
        return None
    start = name.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = OPCODE.match(line, end)
    if not opcode:
        return None
    last = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : last - 1]
    result = tuple(Array(dtype, _numbers(shape)) for dtype, shape in ARRAY.findall(line[start:end]))
    return Instruction(name[1], result, opcode[1], tuple(re.findall(r"%([\w.\-]+)", arguments)), arguments, line[last:])


def _closing(line: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in re.finditer(r"[()]", line[start:]):
        depth += 1 if place[0] == "(" else -1
        if not depth:
            return start + place.end()
    return len(line)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
