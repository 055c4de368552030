"""The interface of models and configurations that the rest of the project relies on."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx

from equivit import errors
from equivit.layers.dropout import Key
from equivit.layers.grid import check_grid
from equivit.layers.rngs import Keys
from equivit.layers.stack import Indices
from equivit.models.features import Features


class Model(Protocol):
    """The interface of a model, which is a `nnx.Module`.

    `key` drives stochastic depth and dropout; None disables both.  With `train`, batch norms use and record the
    statistics of these inputs.  `Switched` says how Flax's `train()` and `eval()` change both.  All methods raise
    ValueError for inputs of a shape that the model does not take.

    Attributes:
      config: the configuration it was built from; `config.build(rngs)` builds another model.
      head: maps the output of `pooled` to logits, or None.
      before: names of the attributes that come before the blocks, for layer-wise learning rates.
    """

    config: Any
    head: nnx.Module | None

    def __call__(self, inputs: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes]; ValueError for a model without a head."""
        ...

    def pooled(self, inputs: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """The input of the head, [*B, features]."""
        ...

    def embedding(self, inputs: jax.Array) -> Features:
        """Tokens grouped by role, before the first block."""
        ...

    def features(
        self, inputs: jax.Array, *, blocks: Indices = (), norm: bool = True, key: Key = None, train: bool = False
    ) -> Features:
        """Tokens grouped by role, after the last block and after each block in `blocks`.

        Args:
          norm: whether they pass through the final norm.

        Raises:
          IndexError: there is no such block.
          ValueError: `blocks` are not integers.
        """
        ...


class Switched(nnx.Module):
    """Base of models, which `train()` and `eval()` of Flax switch.

    | last called | `key`                                         | `train`  |
    |-------------|-----------------------------------------------|----------|
    | neither     | as given                                      | as given |
    | `train()`   | required by a model with dropout or drop path | True     |
    | `eval()`    | ignored                                       | as given |

    Methods that take neither, such as `selections`, compute as after `eval()`.

    Attributes:
      deterministic, use_running_average: set by Flax; None before.
    """

    config: Any
    deterministic: bool | None = None
    use_running_average: bool | None = None

    @property
    def drops(self) -> bool:
        """Whether the model has dropout or drop path."""
        return any(np.any(getattr(self.config, rate, 0.0)) for rate in ("dropout", "drop_path"))

    def switched(self, key: Key, train: bool) -> tuple[Key, bool]:
        """The key and `train` of a call; ValueError if a key is missing."""
        if self.deterministic is False and key is None and self.drops:
            raise ValueError(
                f"{type(self).__name__}: after train(), dropout and drop path need a key; give key=rngs.dropout() of "
                "nnx.Rngs or a key of jax.random.key, or call eval() first."
            )
        return None if self.deterministic else key, train or self.use_running_average is False

    def evaluated(self) -> Any:
        """The model; after `train()`, a copy after `eval()`."""
        if self.deterministic is not False and self.use_running_average is not False:
            return self
        copy = jax.tree.map(lambda leaf: leaf, self)  # the model itself stays in training
        copy.eval()
        return copy


ModelModule = Any  # an `nnx.Module` that is also a Model; Python has no intersection types


class Config(Protocol):
    """The configuration of a model: a frozen dataclass whose fields are plain values or other configurations.

    If the model cuts images into patches, its configuration has a `patch_size`, (height, width) in pixels.  If it can
    be adaptive, it has `parts`, the adaptive parts, and `check_torus(size)`, which raises ValueError for unsupported
    sizes.
    """

    @property
    def num_classes(self) -> int | None:
        """Number of logits; None for a model without a head."""
        ...

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: (height, width, channels) or (steps, channels)."""
        ...

    def build(self, rngs: nnx.Rngs) -> ModelModule:
        """The model, with parameters drawn from `rngs`."""


def abstract_model(config: Config) -> Any:
    """The model of a configuration, with shapes in place of arrays, which takes no memory."""
    return jax.eval_shape(lambda: config.build(Keys(0)))


def check_input(config: Config, name: str, size: tuple[int, ...], channels: int) -> None:
    """Raise ValueError unless the model takes images (or series) of this size and number of channels.

    Args:
      name: the name of the images in the message.
    """
    if len(size) != len(config.input_shape) - 1:
        raise ValueError(f"{name}: a model of {type(config).__name__} takes inputs of {list(config.input_shape)}.")
    if channels != config.input_shape[-1]:
        raise ValueError(
            f"{name}: they have {channels} channels and the model takes {config.input_shape[-1]}; set data.channels "
            "to 1 (grey) or 3 (RGB), or take another model."
        )
    if (patch := getattr(config, "patch_size", None)) is not None:
        check_grid(size, patch, name)
    if getattr(config, "parts", ()) and (check_torus := getattr(config, "check_torus", None)):
        check_torus(size)


def rngs_of(name: str, rngs: Any) -> nnx.Rngs:
    """The generators given to a function, by default of seed 0; ValueError unless they draw parameters."""
    if rngs is None:
        return Keys(0)
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"{name}: rngs={errors.shown(rngs)} must be an nnx.Rngs, such as nnx.Rngs(0).")
    if not hasattr(rngs, "params"):
        raise ValueError(f"{name}: rngs have neither a default nor a params stream; give nnx.Rngs(0).")
    return rngs


def check_head(model: Any) -> None:
    """Raise ValueError for a model without a head."""
    if model.head is None:
        raise ValueError(
            f"{type(model).__name__}: the model has no head (num_classes=None); call features, or create it with "
            "classes."
        )


def check_headless(name: str, part: str, config: Any) -> None:
    """Raise ValueError if a part of a model, such as "the encoder", has a head."""
    for field, head in (("num_classes", "a head for {} classes"), ("projection", "a projection to {} entries")):
        if (number := getattr(config, field, None)) is not None:
            raise ValueError(
                f"{name}: {part} has {head.format(number)}, which nothing would train; create it with {field}=None."
            )


class Preset(NamedTuple):
    """The model behind a name of the zoo.

    Attributes:
      config: the class of the configuration.
      fields: the fields that differ from their defaults.
      families: for a `family` with another meaning here, a function that computes its fields from the others; explicit
        overrides win, except for None.
    """

    config: type
    fields: Mapping[str, Any]
    families: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = MappingProxyType({})

    def configuration(self, **overrides) -> Config:
        """The configuration with some fields replaced."""
        fields, family = {**self.fields, **overrides}, overrides.get("family")
        if isinstance(family, str) and family in self.families:
            chosen = self.families[family](fields)
            fields |= {name: chosen[name] for name in chosen if name == "family" or overrides.get(name) is None}
        return self.config(**fields)
