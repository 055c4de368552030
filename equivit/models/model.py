"""What every model and every configuration of one offers; the rest of the project asks for nothing else."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from equivit.models.features import Features


class Model(Protocol):
    """A model is a `nnx.Module` with these.

    Attributes:
      config: what it was built from; `config.build(rngs)` builds another.
      head: logits from what `pooled` gives, or None.
      before: names of the attributes that stand before the blocks, for layer-wise learning rates.
    """

    config: Any
    head: nnx.Module | None

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes]; ValueError for a model without a head."""
        ...

    def pooled(self, inputs: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """What the head reads, [*B, features]."""
        ...

    def features(
        self,
        inputs: jax.Array,
        *,
        blocks: tuple[int, ...] = (),
        norm: bool = True,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> Features:
        """Tokens by their role after the last block, and after each of `blocks`."""
        ...


ModelModule = Any  # a `nnx.Module` that is a Model too; no type of Python says both


class Config(Protocol):
    """The choices that make one model: a frozen dataclass, of plain values or of other configurations.

    Attributes:
      num_classes: entries of the logits; None for a model without a head.
    """

    num_classes: int | None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: (height, width, channels) or (steps, channels)."""
        ...

    def build(self, rngs: nnx.Rngs) -> ModelModule:
        """The model, with parameters drawn from `rngs`."""


class Preset(NamedTuple):
    """What a name of the zoo stands for.

    Attributes:
      config: the class of the configuration.
      fields: its fields that are not at their defaults.
      families: by a `family` that is asked for, what gives the fields that it stands for here from all others.
    """

    config: type
    fields: Mapping[str, Any]
    families: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = MappingProxyType({})

    def configuration(self, **overrides) -> Config:
        """The configuration with some fields replaced."""
        fields = {**self.fields, **overrides}
        by_family = self.families.get(overrides.get("family", ""), lambda fields: {})
        return self.config(**{**fields, **by_family(fields)})
