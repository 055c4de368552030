"""Reader of libtpu's dump of a compiled program: its final assembly, and the bundles of each instruction.

A TPU core issues one bundle of operations per cycle unless something stalls it.  The scalar core alone decides how
often a bundle is issued, and its loop counters start from constants.  So its few operations are followed here, bundle
by bundle, through every loop and branch.  Values from outside (an address, a random number) are unknown; a branch that
depends on one is not taken, and its instruction is reported as unread.

The matrix units take one row of an operand per cycle each.  The assembly does not wait for that, the hardware does: a
program can need more cycles for its rows than it has bundles.
"""

import collections
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=assembly-pre-overlay|hlo-details"
DELAY = 4  # bundles after a branch that are issued whether it is taken or not
ROWS, PACKED_ROWS = 8, 16  # that one product takes: a register of 32-bit numbers, or of 16-bit ones
ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}

ARITHMETIC: dict[str, Callable[..., int]] = {f"s{word}.s32": getattr(operator, word) for word in ("add", "sub")}
ARITHMETIC |= {f"s{word}.s32": getattr(operator, word) for word in ("lt", "le", "gt", "ge", "eq", "ne")}
ARITHMETIC |= {"sand.u32": operator.and_, "sor.u32": operator.or_, "sxor.u32": operator.xor, "smul.u32": operator.mul}
ARITHMETIC |= {"sshll.u32": operator.lshift, "sshra.s32": operator.rshift, "sshrl.u32": lambda a, b: a % 2**32 >> b}
ARITHMETIC |= {
    "simm.u32": lambda a: a,
    "smov.u32": lambda a: a,
    "smulhi.u32": lambda a, b: (a % 2**32) * (b % 2**32) >> 32,
    "smin.u32": lambda a, b: min(a, b, key=lambda value: value % 2**32),
}

_LINE = re.compile(r"0:0x[0-9a-f]+ *: \{(.*)\}")
_OPERATION = re.compile(r"(\S+) = (s[\w.]+|por) ?(?:@(!?p\d+) ?)?(.*)")
_PRODUCT = re.compile(r"\(mrf(\d)[^)]*\) = vmatmul\.(?:lmr|8x128\.(\w+))")
_INSTRUCTION = re.compile(r"operation: %(\S+) = (.*)\n.*bundle range: \[\w+:0:0x([0-9a-f]+), \w+:0:0x([0-9a-f]+)\)")
_SHAPE = re.compile(r"\b(\w+)\[([\d,]*)\](\{[^}]*\})?")


class Work(NamedTuple):
    """The work of one instruction on the chip."""

    bundles: int  # issued, every trip of every loop counted
    rows: int  # that the busiest matrix unit takes, one per cycle
    bytes: int  # that it moves between HBM and the core, each operand and result there once
    asynchronous: bool  # whether it moves them while other instructions run
    read: bool  # whether every branch in it was followed; if not, the numbers above are too small


def work(folder: pathlib.Path) -> dict[str, Work]:
    """The work of each instruction of the program dumped in a folder, by its name in HLO."""
    assembly, details = (_first(folder, f"*-TLP-*-{name}.txt") for name in ("assembly-pre-overlay", "hlo-details"))
    bundles = []
    for line in assembly.splitlines():
        if not (match := _LINE.match(line)):
            raise ValueError(f"a line of assembly that is no bundle: {line[:80]!r}")
        bundles.append(match[1].split("; "))
    times, unread = walk(bundles)
    instructions = sorted((int(m[3], 16), int(m[4], 16), m[1], m[2]) for m in _INSTRUCTION.finditer(details))
    places = _places(instructions, len(bundles))
    result = {}
    for _, _, name, text in instructions:
        units = [0] * 4
        for i in places[name]:
            for product in filter(None, map(_PRODUCT.search, bundles[i])):
                units[int(product[1])] += times[i] * (PACKED_ROWS if product[2] == "bf16" else ROWS)
        issued = sum(times[i] for i in places[name])
        result[name] = Work(issued, max(units), *hbm_bytes(text), read=unread.isdisjoint(places[name]))
    return result


def _places(instructions: Sequence[tuple], bundles: int) -> dict[str, list[int]]:
    """Which bundles are an instruction's.

    Ranges overlap where two instructions are the same code: one begins where the other does.  A bundle goes to the
    last to begin of those that hold it, so that none is lost or counted twice.
    """
    owners = [None] * bundles
    for start, end, name, _ in instructions:
        owners[start:end] = [name] * (end - start)
    places = {name: [] for _, _, name, _ in instructions}
    for i, name in enumerate(owners):
        if name is not None:
            places[name].append(i)
    return places


def _first(folder, pattern):
    files = sorted(folder.glob(pattern))  # hlo-details are written twice, first those of this assembly
    if not files:
        raise FileNotFoundError(f"no file {pattern} in {folder}: was libtpu given FLAGS?")
    return files[0].read_text()


def hbm_bytes(text: str) -> tuple[int, bool]:
    """Bytes that an instruction moves between HBM and the core, and whether it does so while others run.

    An array whose layout names a memory space, as in S(1), is not in HBM.  The start of an asynchronous copy moves
    nothing; the bytes are counted at its end, by the result.
    """
    result, opcode, operands = re.match(r"(.*?) ([a-z][\w-]*)\((.*)", text).groups()
    if opcode.endswith("-done"):
        return sum(_sizes(result, everywhere=True)), True
    if opcode.endswith("-start"):
        return 0, True
    return sum(_sizes(result)) + sum(_sizes(operands.split("), ")[0])), False


def _sizes(text, everywhere=False) -> Iterator[int]:
    for kind, shape, layout in _SHAPE.findall(text):
        if kind in ITEMSIZE and (everywhere or "S(" not in layout):
            yield ITEMSIZE[kind] * math.prod(map(int, filter(None, shape.split(","))))


def walk(bundles: list[list[str]]) -> tuple[list[int], set[int]]:
    """The number of times that each bundle is issued, and the places of branches that depend on unknown values."""
    core = _ScalarCore()
    programs = [[match.groups() for text in bundle if (match := _OPERATION.match(text))] for bundle in bundles]
    times, unread = [0] * len(bundles), set()
    place, jumps = 0, {}
    while place < len(bundles):
        times[place] += 1
        if programs[place]:
            target, known = core.issue(programs[place])
            if not known:
                unread.add(place)
            elif target is not None:
                jumps[place + DELAY] = target
        place = jumps.pop(place, place + 1)
    return times, unread


class _ScalarCore:
    """Registers and predicates by name, scalar memory by address; missing values and None are unknown.

    What is stored at an unknown address is taken to lie apart from spilled registers, whose addresses are constants.
    """

    def __init__(self):
        self._known: dict[str | int | None, int | None] = {}
        self._divided = collections.deque()  # quotients and remainders that wait to be popped

    def issue(self, operations: Sequence[tuple]) -> tuple[int | None, bool]:
        """Execute one bundle: where it branches to, if it does, and whether that is known."""
        target, known, writes = None, True, []
        for destination, name, predicate, operands in operations:
            wanted = True if predicate is None else self._predicate(predicate)
            if destination == "(pc)" or name.startswith("scall"):
                if wanted is not False:
                    offset = re.search(r"\(=0x([0-9a-f]+)\)", operands)
                    known = wanted is not None and name == "sbr.rel" and offset is not None
                    target = int(offset[1], 16) if known else None
            elif wanted is not False:
                writes.append(self._write(destination, name, operands, wanted))
        self._known.update(writes)  # at the end: all operations of a bundle read before one writes
        return target, known

    def _write(self, destination, name, operands, wanted) -> tuple[str | int | None, int | None]:
        """The place that an operation changes, and the new value."""
        if name == "sst":
            destination, value = self._address(destination), self._value(operands)
        elif name == "sld":
            address = self._address(operands)
            value = None if address is None else self._known.get(address)
        elif name == "sdivrem.u32":
            a, b = map(self._value, operands.split(", "))
            self._divided += (None, None) if None in (a, b, wanted) else divmod(a % 2**32, b % 2**32)
            value = None
        elif name == "spop":
            value = self._divided.popleft() if operands == "(drf)" and self._divided else None
        elif name == "por":
            values = [self._predicate(operand) for operand in operands.split(", ")]
            value = None if None in values else any(values)
        else:
            values, value = [self._value(operand) for operand in operands.split(", ")], None
            if name in ARITHMETIC and None not in values:
                value = (ARITHMETIC[name](*values) + 2**31) % 2**32 - 2**31  # signed, of 32 bits
        return destination, None if wanted is None else value

    def _value(self, operand: str) -> int | None:
        if not operand.startswith("$"):
            return self._known.get(operand)
        try:
            return int(operand[1:], 0)
        except ValueError:  # a floating-point number; no counter of a loop is one
            return None

    def _predicate(self, operand: str) -> bool | None:
        value = self._value(operand.lstrip("!"))
        return value if value is None else bool(value) != operand.startswith("!")

    def _address(self, operand: str) -> int | None:
        """An address of scalar memory, as in [smem:s2+$0x4]."""
        values = [self._value(part) for part in operand.removeprefix("[smem:").rstrip("]").split("+")]
        return None if None in values else sum(values)
