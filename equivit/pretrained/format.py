"""The description of a foreign format, which ends each format's file, and what it asks of a state dict."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from equivit import constraints
from equivit.pretrained import reading
from equivit.pretrained.mapping import Table

# Heads of the published sizes Pico and Nano (Jumbo), Ti, S, M, B, L, H and DINOv2's g; no file stores them.
HEADS = {96: 3, 128: 4, 192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16, 1536: 24}
T = TypeVar("T")


class MissingHint(ValueError):
    """A property that the file does not determine; pass it as a hint.

    Attributes:
      hint: its name, a field of the model's configuration.
    """

    def __init__(self, hint: str, message: str):
        super().__init__(message)
        self.hint = hint


def with_hints(load: Callable[..., T], known: Mapping[str, Any]) -> T:
    """Call `load` with the known hints that its file does not determine."""
    hints: dict[str, Any] = {}
    while True:
        try:
            return load(**hints)
        except MissingHint as missing:
            if missing.hint in hints or missing.hint not in known:
                raise
            hints[missing.hint] = known[missing.hint]


class State(dict[str, np.ndarray]):
    """The tensors of a file by name; errors begin with `source`."""

    def __init__(self, tensors: Mapping[str, np.ndarray], source: str):
        super().__init__(tensors)
        self.source = source

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor.  ValueError if it is absent, empty, or has another number of axes."""
        if name not in self:
            raise ValueError(
                f"{self.source}: no tensor {name!r} among the {len(self)} of the file, such as "
                f"{', '.join(list(self)[:3])}; is it from another source, or wrapped in an unknown way?"
            )
        if self[name].ndim != axes:
            raise ValueError(f"{self.source}: {name} {self[name].shape} must have {axes} axes.")
        if 0 in self[name].shape:
            raise ValueError(f"{self.source}: {name} {self[name].shape} is empty.")
        return self[name].shape

    def out(self, module: str, axes: int = 2) -> int:
        """The outputs of a linear map, of a convolution (4 axes) or of a norm (1)."""
        return self.shape(f"{module}.weight", axes)[0]

    def classes(self, head: str = "head") -> int | None:
        """The outputs of the head with this name; None if the file has none."""
        return self.out(head) if f"{head}.weight" in self else None

    def depth(self, blocks: str = "blocks") -> int:
        """The number of blocks, with tensors named `<blocks>.<i>.`.  ValueError if there are none or one is missing."""
        indices = {int(match[1]) for name in self if (match := re.match(rf"{re.escape(blocks)}\.(\d+)\.", name))}
        if not indices:
            raise ValueError(f"{self.source}: no tensor of the file is named {blocks}.<i>...")
        if (number := len(indices)) <= max(indices):
            gap = next(i for i in range(number) if i not in indices)
            raise ValueError(
                f"{self.source}: block {gap} is missing; the file has {number} blocks, up to {max(indices)}."
            )
        return number

    def count(self, name: str, blocks: str = "blocks") -> int:
        """The number of blocks with a tensor of that name."""
        return sum(bool(re.fullmatch(rf"{re.escape(blocks)}\.\d+\.{re.escape(name)}", key)) for key in self)

    def heads(self, width: int, num_heads: Any) -> int:
        """`num_heads`, or the heads of the published model of this width; MissingHint if there is no such model."""
        if num_heads is not None:
            constraints.check(f"{self.source}: num_heads", num_heads, constraints.PositiveInt)
            return num_heads
        if width not in HEADS:
            raise MissingHint(
                "num_heads",
                f"{self.source}: no published model has the width {width} (they have {', '.join(map(str, HEADS))}); "
                "give num_heads=, which no file determines.",
            )
        return HEADS[width]


class Hints(NamedTuple):
    """Properties of a model that its file may not determine; None without a hint."""

    num_heads: int | tuple[int, ...] | None = None
    image_size: tuple[int, int] | None = None
    family: str | None = None
    window_size: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """One foreign format.

    Attributes:
      name: the source in `pretrained.load`.
      flavours: spellings of the format, the usual one first.
      kind: the class of its configurations.
      configuration: (state, hints) -> (configuration, flavour); ValueError as in `infer`.
      table: (configuration, flavour) -> all tensors of such a file.
      default_flavour: configuration -> the flavour to write; None: always the first.
      rename: applied first to each name of a file; removes wrappers and chunks.
      unstacked: content -> content, applied before `rename`; splits tensors that hold all blocks; None: there are none.
      written: (name, configuration, flavour) -> the name in a file that is written, with prefixes or separators that
        `rename` or `mark` remove; None: the name itself.
      ignored: patterns (`re.search`) of renamed tensors to leave out, such as r"\\.num_batches_tracked$".
      require: (state, options of `load`) -> None; ValueError if a required option is missing.
      separate_head: if heads are separate files with the tensors `weight` and `bias`, the prefix of these names in a
        classifier.
      mark: a pattern of a whole name found only in files of this format, or in one listed later; it also determines
        the prefix of names, such as "model.".  "": the format is never detected.
    """

    name: str
    flavours: tuple[str, ...]
    kind: type
    configuration: Callable[[State, Hints], tuple[Any, str]]
    table: Callable[[Any, str], Table]
    default_flavour: Callable[[Any], str] | None = None
    rename: Callable[[str], str] = reading.unwrapped
    unstacked: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] | None = None
    written: Callable[[str, Any, str], str] | None = None
    ignored: tuple[str, ...] = ()
    require: Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], None] | None = None
    separate_head: str | None = None
    mark: str = ""

    def infer(self, state: Mapping[str, np.ndarray], **hints) -> tuple[Any, str]:
        """The configuration and the flavour of a state dict; `hints` are the fields of `Hints`.

        Raises:
          ValueError: names and shapes match no model of this format, or a hint is missing or contradicts them.
        """
        given = Hints(**hints)
        config, flavour = self.configuration(State(state, self.name), given)
        vit = getattr(config, "encoder", config)  # for a masked autoencoder, hints apply to the encoder
        for name, value in given._asdict().items():
            if value is None or value == getattr(vit, name, None):
                continue
            found = f"the weights are those of {getattr(vit, name)!r}" if hasattr(vit, name) else "its models have none"
            raise ValueError(f"{self.name}: {name}={value!r}, but {found}.")
        return config, flavour


def require(config: Any, source: str, **values) -> None:
    """ValueError if a field of the configuration has a value that the format's code does not support."""
    for name, value in values.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{source}: cannot hold a model with {name}={found!r}; its code has {value!r}.")
