"""A reader for the pickle of a torch file that never runs code from it.

Python's unpickler looks up methods of the objects it builds and hashes any key in a file.  Here the operations written
by `torch.save` make plain values, and the caller's functions make everything else.  All other operations are rejected,
so a file can neither reach an object of this process nor keep it busy.
"""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from equivit.archives import Refused
from equivit.errors import shown

OBJECT = 100  # bytes that an operation may take in memory, without the characters of its string
CHARACTER = 4  # bytes
LARGEST_KEY = 2**48  # optimizers number their states; old ones used addresses
GIVEN = {  # operations that push their argument
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
REMEMBER = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
RECALL = ("BINGET", "LONG_BINGET")
IGNORED = ("PROTO", "FRAME", "STOP")


class Name(NamedTuple):
    """A class or function named by a file; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return shown(f"{self.module}.{self.name}")[1:-1]


class Shell:
    """Placeholder for an object of a class.

    Attributes:
      attributes: the attributes set by the file, by name.
    """

    def __init__(self):
        self.attributes: dict[str, Any] = {}


class Machine:
    """Reads one pickle.

    Args:
      find: name -> the function to call in its place, or None if it must not be called; `Refused` for an unknown name.
      stored: persistent id -> value.
      claim: (what, bytes) -> None; `Refused` if that exceeds the memory the file may take.
    """

    def __init__(
        self,
        find: Callable[[Name], Callable | None],
        stored: Callable[[Any], Any],
        claim: Callable[[str, int], None],
    ):
        self._find, self._stored, self._claim = find, stored, claim
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stack before each mark
        self._memory: dict[int, Any] = {}

    def load(self, content: bytes) -> Any:
        """The value that a pickle describes.

        Raises:
          Refused: an unsupported operation, name or key.
          Exception: nearly any, if the pickle is damaged.
        """
        for opcode, argument, _ in pickletools.genops(content):
            length = len(argument) if isinstance(argument, str | bytes) else 0
            self._claim("an object", OBJECT + CHARACTER * length)
            if opcode.name in REMEMBER and isinstance(argument, int) and argument > len(content):
                raise Refused(f"is damaged: it stores an object at memo index {argument:,}.")
            self._run(opcode.name, argument)
        return self._stack.pop()

    def _run(self, operation: str, argument: Any) -> None:
        """Apply an operation to the stack."""
        stack = self._stack
        if operation in GIVEN:
            stack.append(argument)
        elif operation in MADE:
            stack.append(MADE[operation]())
        elif operation in REMEMBER:
            self._memory[len(self._memory) if operation == "MEMOIZE" else argument] = stack[-1]
        elif operation in RECALL:
            stack.append(self._memory[argument])
        elif operation in SHORT_TUPLES:
            self._put(tuple(self._take(SHORT_TUPLES[operation])))
        elif operation == "MARK":
            self._below.append(stack)
            self._stack = []
        elif operation == "TUPLE":
            self._put(tuple(self._since_mark()))
        elif operation in ("APPEND", "APPENDS"):
            values = self._take(1) if operation == "APPEND" else self._since_mark()
            _of_type(self._stack[-1], list).extend(values)
        elif operation in ("SETITEM", "SETITEMS"):
            pairs = self._take(2) if operation == "SETITEM" else self._since_mark()
            _set(_of_type(self._stack[-1], dict), pairs)
        elif operation in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ") if operation == "GLOBAL" else self._take(2)
            name = Name(*(_of_type(part, str) for part in parts))
            self._find(name)
            self._put(name)
        elif operation in ("REDUCE", "NEWOBJ"):
            name, arguments = self._take(2)
            if (make := self._find(_of_type(name, Name))) is None:
                raise Refused(f"calls {name}, which is not a tensor function.")
            self._put(make(*_of_type(arguments, tuple)))
        elif operation == "BUILD":
            (state,) = self._take(1)
            _build(stack[-1], state)
        elif operation == "BINPERSID":
            self._put(self._stored(*self._take(1)))
        elif operation not in IGNORED:
            raise Refused(f"has the operation {operation}, unknown to torch.save; save it again with torch.save.")

    def _put(self, value: Any) -> None:
        self._stack.append(value)

    def _take(self, number: int) -> list[Any]:
        """Pop the values at the top of the stack."""
        if len(self._stack) < number:
            raise ValueError("its stack is empty")
        values = self._stack[-number:]
        del self._stack[-number:]
        return values

    def _since_mark(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        values, self._stack = self._stack, self._below.pop()
        return values


def _of_type(value: Any, kind: type) -> Any:
    """The value; ValueError unless it has exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} must be")
    return value


def _set(table: dict, pairs: list[Any]) -> None:
    """Set alternating keys and values.  Keys must be plain: hashing nested tuples can take forever."""
    if len(pairs) % 2:
        raise ValueError("a key has no value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) is not str and not (type(key) is int and abs(key) <= LARGEST_KEY):
            raise Refused(
                f"has a dictionary with a key of type {type(key).__name__}; keys must be strings or "
                f"whole numbers up to {LARGEST_KEY:,}."
            )
        table[key] = value


def _build(target: Any, state: Any) -> None:
    """Set the attributes of a shell, once; attributes of a dictionary (torch's `_metadata`) are dropped."""
    if type(target) is dict:
        return
    if not isinstance(target, Shell) or target.attributes or type(state) is not dict:
        what = "class or function" if type(target) is Name else type(target).__name__
        raise Refused(f"sets the state of a {what}; only objects of known classes have one, and it is set once.")
    target.attributes = state  # no copy, which a file could request repeatedly
