"""Facts in a `config.json` of transformers or timm that weights do not determine, and the names of classes."""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from equivit.layers import rotary
from equivit.pretrained import places
from equivit.trained_on import TrainedOn

# Activations: transformers' name to ours.
ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
# Fields: transformers' name to ours; a list has a value for each stage.
FIELDS = {"num_attention_heads": "num_heads", "num_heads": "num_heads", "layer_norm_eps": "norm_eps"}
FIELDS |= {"patch_stride": "strides", "patch_padding": "paddings"}  # of CvT


def is_public(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` describes a model of the Hub, rather than a run."""
    return bool({"model_type", "architectures", "architecture"} & config.keys())


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Hints and options of `pretrained.load`, as far as the configuration has them.

    Raises ValueError for an activation or windows that no model here has.
    """
    if "architecture" in config:
        return _of_timm(config)
    config = config.get("vision_config") or config  # of CLIP
    found: dict[str, Any] = {}
    for theirs, ours in FIELDS.items():
        if isinstance(value := config.get(theirs), int | float | list):
            found[ours] = tuple(value) if isinstance(value, list) else value
    if config.get("model_type") == "cvt":
        found.pop("norm_eps", None)  # its code reads no such field
    for name in ("image_size", "window_size"):
        if (pair := _pair(config.get(name))) is not None:
            found[name] = pair
    if any(config.get("pretrained_window_sizes") or ()):
        raise _larger_windows(f"pretrained_window_sizes={config['pretrained_window_sizes']!r}")
    gated = config.get("use_gated_mlp")  # of DINOv3; DINOv2's gated MLP does not read the activation
    if gated and config.get("hidden_act") != "silu":
        raise ValueError(f"config.json: use_gated_mlp with hidden_act={config.get('hidden_act')!r} must have 'silu'.")
    if config.get("rope_theta", rotary.BASE) != rotary.BASE:
        raise ValueError(f"config.json: rope_theta={config['rope_theta']!r} must be {rotary.BASE:g}, as in DINOv3.")
    if isinstance(activation := config.get("hidden_act"), str) and not (gated or config.get("use_swiglu_ffn")):
        if activation not in ACTIVATIONS:
            raise ValueError(f"config.json: hidden_act={activation!r} is not one of {', '.join(ACTIVATIONS)}.")
        found["mlp"] = ACTIVATIONS[activation]
    return found


def entries(fields: Mapping[str, Any]) -> str:
    """Activation and epsilon of a model as entries of a transformers `config.json`."""
    names = {"mlp": "hidden_act", "norm_eps": "layer_norm_eps"}
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return ", ".join(f'"{names[name]}": {json.dumps(activations.get(value, value))}' for name, value in fields.items())


def classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes in the order of the logits; () if there are none."""
    names = config.get("id2label") or config.get("label_names") or config.get("pretrained_cfg", {}).get("label_names")
    if isinstance(names, Mapping):
        if sorted(map(str, names)) != sorted(map(str, range(len(names)))):
            return ()
        names = [{str(key): name for key, name in names.items()}[str(label)] for label in range(len(names))]
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        return ()
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else tuple(names)


def trained_on(path: pathlib.Path) -> TrainedOn:
    """The classes and the statistics of images of the weights at a path, as far as files beside them have them."""
    config = places.config(path)
    processor = places.config(path, "preprocessor_config.json")
    timm = config.get("pretrained_cfg", {})
    found = {"mean": processor.get("image_mean", timm.get("mean")), "std": processor.get("image_std", timm.get("std"))}
    known = all(isinstance(value, list) and len(value) == 3 for value in found.values())
    return TrainedOn(classes(config), images={name: tuple(value) for name, value in found.items()} if known else {})


def _of_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of timm's configuration: the input size, and from the names of model and weights activation and windows."""
    name, found, weights = str(config["architecture"]), {}, config.get("pretrained_cfg", {})
    size = weights.get("input_size")
    if isinstance(size, list) and len(size) == 3:
        found["image_size"] = (size[1], size[2])
    if "_clip_" in name:
        # OpenAI's weights need the quick GELU, also under the names of timm's models with the exact one.
        found["mlp"] = "quick_gelu" if "quickgelu" in name or weights.get("tag") == "openai" else "gelu"
    if re.match(r"swinv2_.*window\d+to\d+", name):
        raise _larger_windows(f"architecture={name!r}")
    if window := re.match(r"swinv2_.*window(\d+)", name):
        found["window_size"] = (int(window[1]), int(window[1]))
    return found


def _larger_windows(field: str) -> ValueError:
    return ValueError(
        f"config.json: {field}, a SwinV2 tuned with larger windows than it was trained with, is no model here; take "
        "its version of one window size."
    )


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    return tuple(value) if isinstance(value, list) and len(value) == 2 else None
