"""The entries of `ViTConfig.replaced`: blocks with convolution instead of attention (`layers/depthwise.py`)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from equivit import errors
from equivit.layers.depthwise import FORMS, KINDS, checked_heads
from equivit.layers.depthwise_conv import check_taps

EXAMPLE = "((3, 'dw', 3, None),), each (block, kind, kernel_size, heads, form)"


class Replaced(NamedTuple):
    """A block whose attention is replaced.

    Attributes:
      block: index of the block.
      kind: one of KINDS.
      kernel_size: k, odd; without meaning for "identity".
      heads: the replaced heads, ascending; None for all.
      form: one of FORMS.
    """

    block: int
    kind: str = "dw"
    kernel_size: int = 3
    heads: tuple[int, ...] | None = None
    form: str = "released"

    def of(self, name: str, depth: int, num_heads: int) -> "Replaced":
        """Check the entry against a model, and normalise all heads to None; ValueError for other blocks or heads."""
        name = f"{name}: replaced={tuple(self)}"
        if not 0 <= self.block < depth:
            raise ValueError(f"{name}: there is no block {self.block}; take 0 to {depth - 1}.")
        return self._replace(heads=checked_heads(name, self.kind, self.heads, num_heads))


def as_replaced(name: str, entries: Any) -> tuple[Replaced, ...]:
    """The entries (block, kind, kernel_size, heads, form), sorted by block; all but `block` have defaults.

    Lists, as in JSON, count as tuples.

    Raises:
      ValueError: malformed entries, an unknown kind or form, even k, or a block listed twice.
    """
    if not isinstance(entries, tuple | list) or not all(isinstance(one, tuple | list) for one in entries):
        raise ValueError(f"{name}: replaced={errors.shown(entries)} must be entries such as {EXAMPLE}.")
    found = sorted((_entry(name, one) for one in entries), key=lambda one: one.block)
    blocks = [one.block for one in found]
    if twice := sorted({block for block in blocks if blocks.count(block) > 1}):
        raise ValueError(f"{name}: replaced has block {twice[0]} twice; a block is replaced once.")
    return tuple(found)


def from_saved(entries: list[list[Any]]) -> list[list[Any]]:
    """The entries of a saved model; those without a form are from a time when all models had the printed one."""
    return [[*entry, "printed"] if len(entry) == 4 else entry for entry in entries]


def _entry(name: str, entry: Iterable[Any]) -> Replaced:
    parts: Any = tuple(tuple(part) if isinstance(part, list) else part for part in entry)
    if not (1 <= len(parts) <= 5 and _is_form(Replaced(*parts))):
        raise ValueError(f"{name}: replaced has {errors.shown(parts)}; entries are such as {EXAMPLE}.")
    one = Replaced(*parts)
    errors.one_of(f"{name}: replaced={parts}: kind", one.kind, KINDS)
    errors.one_of(f"{name}: replaced={parts}: form", one.form, FORMS)
    check_taps(f"{name}: replaced={parts}", one.kernel_size, "zeros")
    return one


def _is_form(one: Replaced) -> bool:
    if not isinstance(one.heads, tuple | None):
        return False
    return (
        isinstance(one.kind, str)
        and isinstance(one.form, str)
        and all(type(n) is int for n in (one.block, one.kernel_size, *(one.heads or ())))
    )
