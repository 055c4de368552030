"""Intervals of numbers that programs can represent: floats in float32, whole numbers in int32."""

import dataclasses
import math
import struct
from typing import Any

from equivit import errors

LARGEST_INT = 2**31 - 1
LARGEST, SMALLEST = 2.0**128 - 2.0**104, 2.0**-126  # of float32, without its subnormal numbers


@dataclasses.dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`."""

    low: float = -math.inf
    high: float = math.inf
    open: str = ""  # "(" excludes `low`, ")" excludes `high`, "()" excludes both
    words: str = ""  # a description for messages instead of "in [low, high]"
    whole: bool = False  # whole numbers only

    def __contains__(self, value: Any) -> bool:
        if not errors.is_number(value) or not self._surrounds(value):
            return False
        if isinstance(value, int):
            return self.whole or abs(value) <= LARGEST_INT
        held = _in_float32(value)  # must not underflow to 0, which disables a rate
        return not self.whole and math.isfinite(held) and self._surrounds(held) and bool(held) == bool(value)

    def integers(self) -> "Interval":
        """Return the whole numbers of this interval, within int32 unless `high` is given."""
        high = LARGEST_INT if self.high == math.inf else self.high
        return dataclasses.replace(self, whole=True, low=max(self.low, -LARGEST_INT), high=high)

    def _surrounds(self, value: float) -> bool:
        above = value > self.low if "(" in self.open else value >= self.low
        return above and (value < self.high if ")" in self.open else value <= self.high)

    def rule(self, value: Any) -> str:
        """Describe the valid numbers in a message about `value`."""
        left, right = "(" if "(" in self.open else "[", ")" if ")" in self.open else "]"
        rule = self.words or f"in {left}{self.low}, {self.high}{right}"
        noun = "whole number" if self.whole else "number"
        if not self.whole and errors.is_number(value):
            return rule if abs(value) <= LARGEST or rule == "finite" else f"{rule} and finite"
        if " " not in rule:
            return f"a {rule} {noun}"
        return f"a {noun} {rule}" if rule.startswith("in ") else f"a {noun}, {rule}"

    def hint(self, value: Any) -> str:
        """Explain why a number that seems valid is not, such as "; in float32 it is 0"; else return ""."""
        if isinstance(value, bool):
            return f"; {value} is not a number"
        if self.whole or not errors.is_number(value) or not self._surrounds(value) or abs(value) == math.inf:
            return ""
        if isinstance(value, int) and abs(value) <= LARGEST:
            return f"; write {float(value)}"
        return f"; in float32 it is {_in_float32(value):g}"

    def nearest(self, value: Any) -> Any:
        """Return the nearest valid number, or None."""
        if not errors.is_number(value) or not abs(value) < math.inf:
            return None
        if self.whole:
            value = round(max(value, self.low + 1) if "(" in self.open else value)
        near = min(max(value, self.low), self.high)
        return near if near in self else None


def _in_float32(value: float) -> float:
    """Round to float32; below its normal numbers to zero, as compiled programs do."""
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return struct.unpack("f", struct.pack("f", value))[0] if abs(value) >= SMALLEST else 0.0
