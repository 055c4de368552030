"""Named models.  `create("octic_vit_h14", family="I8")` builds one; overrides are fields of its configuration.

Each file of models names its own (`NAMES`).
"""

import dataclasses
import difflib

import jax
from flax import nnx

from equivit.models import decoders, jumbo_vit, patchtst, vit_config
from equivit.models.model import Config

# What a saved model calls its configuration.
CONFIGS: dict[str, type] = {
    "vit": vit_config.ViTConfig,
    "jumbo_vit": jumbo_vit.JumboViTConfig,
    "masked_autoencoder": decoders.MaskedAutoencoderConfig,
    "patchtst": patchtst.PatchTSTConfig,
}
NAMES = vit_config.NAMES | jumbo_vit.NAMES | patchtst.NAMES


def names() -> list[str]:
    """All names that `create` knows."""
    return list(NAMES)


def configuration(name: str, **overrides) -> Config:
    """The configuration of a named model with some fields replaced.

    Raises:
      ValueError: no such name, no such field, or a field that has no default is missing; the message gives the nearest.
    """
    if name not in NAMES:
        raise ValueError(f"model {name!r} is not known; {_nearest(name, names())}")
    preset = NAMES[name]
    fields = dataclasses.fields(preset.config)
    for key in overrides:
        if key not in (known := [field.name for field in fields]):
            raise ValueError(f"model {name}: {key!r} is not one of its options; {_nearest(key, known)}")
    wanted = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := [key for key in wanted if key not in preset.fields and key not in overrides]:
        raise ValueError(f"model {name}: {', '.join(missing)} must be given; the data decide them.")
    return preset.configuration(**overrides)


def create(name: str, *, rngs: nnx.Rngs | None = None, **overrides) -> nnx.Module:
    """Build a named model, with parameters drawn from `rngs` (seed 0 if None)."""
    return configuration(name, **overrides).build(rngs or nnx.Rngs(params=0))


def build(config: Config, rngs: nnx.Rngs) -> nnx.Module:
    """The model of a configuration."""
    return config.build(rngs)


def abstract(name: str, **overrides) -> nnx.Module:
    """The named model with shapes in place of arrays; costs no memory."""
    return jax.eval_shape(lambda: create(name, **overrides))


def kind(config: Config) -> str:
    """The key of `CONFIGS` that a configuration belongs to."""
    return next(name for name, known in CONFIGS.items() if type(config) is known)


def _nearest(word: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(valid)}."
