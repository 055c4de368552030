"""Named models.  `create("octic_vit_h14", family="I8")` builds one; overrides are fields of its configuration.

Each model file lists its names (`NAMES`).
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from equivit import constraints, errors
from equivit.models import decoders, timm_names
from equivit.models.bixt import model as bixt
from equivit.models.cvt import model as cvt
from equivit.models.efficientvit import model as efficientvit
from equivit.models.mobilenetv4 import model as mobilenetv4
from equivit.models.model import Config, Preset, rngs_of
from equivit.models.mvit import model as mvit
from equivit.models.patchtst import model as patchtst
from equivit.models.reconfiguration import reconfigure
from equivit.models.segmenter import model as segmenter
from equivit.models.shvit import model as shvit
from equivit.models.swin import model as swin
from equivit.models.vit import config as vit_config
from equivit.models.vit import jumbo as jumbo_vit
from equivit.models.vit import names as vit_names

# The name of each configuration class in a saved model.
CONFIGS: dict[str, type] = {
    "vit": vit_config.ViTConfig,
    "jumbo_vit": jumbo_vit.JumboViTConfig,
    "masked_autoencoder": decoders.MaskedAutoencoderConfig,
    "patchtst": patchtst.PatchTSTConfig,
    "swin": swin.SwinConfig,
    "cvt": cvt.CvTConfig,
    "mvit": mvit.MViTConfig,
    "mobilenetv4": mobilenetv4.MobileNetV4Config,
    "efficientvit": efficientvit.EfficientViTConfig,
    "shvit": shvit.SHViTConfig,
    "bixt": bixt.BiXTConfig,
    "segmenter": segmenter.SegmenterConfig,
}
NAMES = (
    vit_names.NAMES
    | jumbo_vit.NAMES
    | patchtst.NAMES
    | swin.NAMES
    | cvt.NAMES
    | mvit.NAMES
    | mobilenetv4.NAMES
    | efficientvit.NAMES
    | shvit.NAMES
    | bixt.NAMES
)
# Fields by which weights fit a named model.
ARCHITECTURE = ("family", "width", "widths", "depth", "depths", "num_heads", "patch_size", "version", "hidden", "jumbo")
# Size "bigg14" was called "g14"; `dinov2_vit_g14` is DINOv2's ViT-g.
RENAMED = {name.replace("_bigg14", "_g14"): name for name in NAMES if name.endswith("_bigg14")}
RENAMED = {old: new for old, new in RENAMED.items() if old not in NAMES}


def names() -> list[str]:
    """All names that `create` knows."""
    return list(NAMES)


def configuration(name: str, **overrides) -> Config:
    """The configuration of a named model with some fields replaced.

    Raises:
      ValueError: no such name, no such field (the message gives the nearest), or a missing field without default.
    """
    check_options(name, overrides)
    name, overrides = _own_name(name, overrides)
    if name in RENAMED:
        warnings.warn(f"model {name} is called {RENAMED[name]} now.", FutureWarning, stacklevel=2)
    preset = _preset(name)
    if missing := [key for key in _required(preset) if key not in overrides]:
        raise ValueError(f"model {name}: {', '.join(missing)} must be given; they depend on the data.")
    return preset.configuration(**overrides)


def check_options(name: str, options: Iterable[str]) -> None:
    """Raise ValueError unless a model of that name exists and has these options; "name" itself is allowed."""
    if not is_known(name):
        where = "equivit.models.names() lists all"
        raise ValueError(f"model {errors.shown(name)} is not known; {_nearest_name(str(name), where)}")
    config = _preset(name).config
    known = [field.name for field in dataclasses.fields(config)]
    for key in options:
        if key not in ("name", *known):
            where = f"{config.__name__} describes all"
            raise ValueError(
                f"model {name}: {errors.shown(key)} is not one of its options; {_nearest(key, known, where)}"
            )


def types_of(name: str) -> dict[str, Any]:
    """The field types of a named model (`constraints.py`); empty for an unknown name."""
    return constraints.types_of(_preset(name).config) if is_known(name) else {}


def options(config: Config) -> dict[str, Any]:
    """The `model` section of a configuration: its nearest name, and the fields in which it differs.

        configuration(**options(config)) == config

    Raises ValueError for a model without a name, such as a segmenter.
    """
    found = [
        {"name": name, **changes}
        for name, preset in NAMES.items()
        if type(config) is preset.config and (changes := _changes(preset, config)) is not None
    ]
    if not found:
        raise ValueError(f"no name of a model fits a {type(config).__name__}; give one that has a name.")
    return min(found, key=len)


def _changes(preset: Preset, config: Any) -> dict[str, Any] | None:
    """The overrides that turn a preset into a configuration; None if there are none."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    required = {name: values[name] for name in _required(preset)}
    own = preset.configuration(**required)
    changes = required | {name: value for name, value in values.items() if getattr(own, name) != value}
    return changes if preset.configuration(**changes) == config else None


def _required(preset: Preset) -> list[str]:
    """The fields without a default that a preset leaves open."""
    fields = dataclasses.fields(preset.config)
    wanted = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    return [name for name in wanted if name not in preset.fields]


def is_known(name: Any) -> bool:
    """Whether `create` knows a name: one of `names`, an earlier name, or one of timm (`timm_names.py`)."""
    return isinstance(name, str) and _own_name(name, {})[0] in NAMES.keys() | RENAMED.keys()


def create(name: str, *, rngs: nnx.Rngs | None = None, pretrained: str | None = None, **overrides) -> nnx.Module:
    """Build a named model, with parameters drawn at random, or with public weights.

    Args:
      rngs: draws the parameters, such as `nnx.Rngs(0)`; seed 0 if None.
      pretrained: a place of weights, such as "hf:ORG/NAME" (`pretrained.load`).  Their configuration is kept, except
        for the overrides; a head of another size is drawn.  The named model has the hints that a file lacks.

    Raises:
      ValueError: as `configuration`, or `rngs` is a seed or a key, or the weights are of another model; the message
        gives the differing fields.
    """
    config, rngs = configuration(name, **overrides), rngs_of("create", rngs)
    if pretrained is not None:
        return _with_weights(name, config, pretrained, rngs, overrides)
    return config.build(rngs)


def abstract(name: str, **overrides) -> nnx.Module:
    """The named model with shapes instead of arrays, which takes no memory."""
    return jax.eval_shape(lambda: create(name, **overrides))


def _with_weights(name: str, config: Any, place: str, rngs: nnx.Rngs, overrides: Mapping[str, Any]):
    """The model at a place, with overrides as its fields; ValueError unless it has the architecture of `config`."""
    from equivit import pretrained  # it needs this file, and is needed only here
    from equivit.pretrained.format import with_hints

    names = {field.name for field in dataclasses.fields(config)}
    names -= {"image_size"} - overrides.keys()  # unless given, it may differ from the file's
    known = {field: getattr(config, field) for field in names}
    model: Any = with_hints(functools.partial(pretrained.load, place), known)
    theirs: Any = model.config
    wrong = [
        f"{field} {getattr(theirs, field, None)}, not {getattr(config, field)}"
        for field in ARCHITECTURE
        if hasattr(config, field) and getattr(theirs, field, None) != getattr(config, field)
    ]
    if type(theirs) is not type(config) or wrong:
        has = ", ".join(wrong) or f"a {kind(theirs)}"
        raise ValueError(f"model {name}: the weights at {place} are of another model: {has}.")
    fields = _own_name(name, overrides)[1]
    if "num_classes" in fields and getattr(theirs, "projection", None) is not None:
        fields["projection"] = None  # one head only
    return reconfigure(model, rngs=rngs, **fields)[0]


def kind(config: Config) -> str:
    """The key in `CONFIGS` of a configuration's class."""
    return next(name for name, known in CONFIGS.items() if type(config) is known)


def _preset(name: str) -> Preset:
    name, _ = _own_name(name, {})
    return NAMES[RENAMED.get(name, name)]


def _own_name(name: str, overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Our name of a model, and its overrides, which a name of timm may complete."""
    found = None if name in NAMES else timm_names.translated(name)
    if found is None or found[0] not in NAMES:
        return name, dict(overrides)
    return found[0], {**found[1], **overrides}


def _nearest_name(name: str, where: str) -> str:
    """The nearest names in any spelling."""
    spelled = {timm_names.spelled(known): known for known in NAMES}
    if close := errors.near(timm_names.spelled(name), spelled, 3):
        return f"did you mean {' or '.join(spelled[one] for one in close)}?"
    return _nearest(name, names(), where)


def _nearest(word: str, valid: list[str], where: str) -> str:
    close = errors.near(word, valid, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {errors.listed(valid)}; {where}."
