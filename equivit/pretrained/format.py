"""The description of a foreign format; each format's file ends with a `Format`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from equivit.pretrained import names
from equivit.pretrained.inference import State
from equivit.pretrained.mapping import Table


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
      ignored: patterns (`re.search`) of renamed tensors to leave out, such as r"\\.num_batches_tracked$".
      require: (state, options of `load`) -> None; ValueError if a required option is missing.
      separate_head: if heads are separate files with the tensors `weight` and `bias`, the prefix of these names in a
        classifier.
      mark: for a source's further kind of model: a pattern of names found only in its files.
    """

    name: str
    flavours: tuple[str, ...]
    kind: type
    configuration: Callable[[State, Hints], tuple[Any, str]]
    table: Callable[[Any, str], Table]
    default_flavour: Callable[[Any], str] | None = None
    rename: Callable[[str], str] = names.unwrapped
    ignored: tuple[str, ...] = ()
    require: Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], None] | None = None
    separate_head: str | None = None
    mark: str | None = None

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
