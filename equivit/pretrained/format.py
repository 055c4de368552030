"""The description of a foreign format; each format's file ends in a value of `Format`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from equivit.pretrained import names
from equivit.pretrained.mapping import Table

State = Mapping[str, np.ndarray]


class Hints(NamedTuple):
    """Properties of a model that its file may not determine; None where the caller gives no hint."""

    num_heads: int | tuple[int, ...] | None = None
    image_size: tuple[int, int] | None = None
    family: str | None = None
    window_size: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """One foreign format.

    Attributes:
      name: the source, as `pretrained.load` takes it.
      flavours: spellings of the format, the usual one first.
      kind: the class of its configurations.
      configuration: (state, hints) -> (configuration, flavour).
      table: (configuration, flavour) -> all tensors of such a file.
      default_flavour: configuration -> the flavour to write; None: always the first.
      rename: applied to each name of a file before anything else; takes off wrappers and chunks.
      ignored: patterns (`re.search`) of renamed tensors to leave out, such as r"\\.num_batches_tracked$".
      require: (state, options of `load`) -> None; ValueError where a file does not tell what the options must.
      separate_head: where heads are files of their own with the tensors `weight` and `bias`, what their names begin
        with beside the backbone's.
      mark: for another kind of model of a source that has one: a pattern of names that only its files have.
    """

    name: str
    flavours: tuple[str, ...]
    kind: type
    configuration: Callable[[State, Hints], tuple[Any, str]]
    table: Callable[[Any, str], Table]
    default_flavour: Callable[[Any], str] | None = None
    rename: Callable[[str], str] = names.unwrapped
    ignored: tuple[str, ...] = ()
    require: Callable[[State, Mapping[str, Any]], None] | None = None
    separate_head: str | None = None
    mark: str | None = None

    def infer(self, state: State, **hints) -> tuple[Any, str]:
        """The configuration and the flavour of a state dict; `hints` are the fields of `Hints`.

        Raises:
          ValueError: names and shapes tell of no model of this format, or a hint does not go with them.
        """
        given = Hints(**hints)
        config, flavour = self.configuration(state, given)
        vit = getattr(config, "encoder", config)  # of a masked autoencoder the hints are about the encoder
        for name, value in given._asdict().items():
            if value is None or value == getattr(vit, name, None):
                continue
            found = f"the weights are those of {getattr(vit, name)!r}" if hasattr(vit, name) else "its models have none"
            raise ValueError(f"{self.name}: {name}={value!r}, but {found}.")
        return config, flavour
