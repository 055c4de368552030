"""Models on disk: a directory with `model.json`, the configuration, and `parameters.safetensors`.

The parameters file stores a digest of model.json, to detect files of different models; model.json also records the
training data (`trained_on.py`).  Parameters and running statistics are stored as logical tensors (`logical.py`), so
files do not depend on how layers and irreps are stacked in memory.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors, files, logical, safetensors_files
from equivit.layers.rngs import Keys
from equivit.models import zoo
from equivit.models.model import Config, ModelModule, abstract_model
from equivit.models.vit.replaced import from_saved
from equivit.trained_on import UNKNOWN, TrainedOn, from_json

TRAINED_ON = "trained_on"  # in model.json, next to the configuration's fields
DIGEST = "model.json"  # in the metadata of the parameters
T = TypeVar("T")


def save(path: str | os.PathLike, model: ModelModule, data: TrainedOn = UNKNOWN) -> None:
    """Write the model to the directory `path`, which is created if needed.

    A process killed during saving leaves the old model, or one that `load` rejects.

    Args:
      model: a model whose arrays are in this process.
      data: its training data.

    Raises:
      OSError: a file cannot be written.
      ValueError: the parameters are not of the model's configuration, as after `fold`; nothing is written.
    """
    path = pathlib.Path(path)
    description = {**_described(model.config), TRAINED_ON: data.to_json()}
    tensors = jax.device_get(logical.to_logical(model, nnx.Variable))
    if wrong := _misfits(_expected(model.config), tensors):
        raise ValueError(
            f"{path}: not saved, since the parameters do not fit the model's configuration; missing, unexpected or "
            f"misshapen: {wrong}.  Save the model before fold or deployed, and change its head by models.reconfigure."
        )
    with files.replacing_in_directory(path, ("parameters.safetensors", "model.json")) as unfinished:
        metadata = {DIGEST: _digest(description)}
        safetensors_files.write(unfinished / "parameters.safetensors", tensors, metadata)
        files.write_text(unfinished / "model.json", json.dumps(description, indent=1) + "\n")


def is_saved(path: str | os.PathLike) -> bool:
    """Whether a path is the directory of a saved model."""
    return (pathlib.Path(path) / "model.json").is_file()


def load(path: str | os.PathLike) -> nnx.Module:
    """Read the model in a directory that `save` wrote.

    Raises:
      FileNotFoundError: there is no saved model in the directory.
      ValueError: a file is damaged, a tensor has an unsupported type, or the parameters do not match the configuration,
        are not floating point where required, or are not finite.
    """
    path = pathlib.Path(path)
    config, expected, digest = _read(path / "model.json", _configuration)
    if not (path / "parameters.safetensors").is_file():
        raise FileNotFoundError(f"{path}: has a model.json, but no parameters.safetensors.")
    tensors = safetensors_files.read(path / "parameters.safetensors")
    _check_tensors(path, expected, tensors)
    if safetensors_files.metadata(path / "parameters.safetensors").get(DIGEST, digest) != digest:
        raise ValueError(
            f"{path}: model.json and parameters.safetensors were not saved together, such as by a save that was "
            "interrupted; save or copy the model again."
        )
    return logical.from_logical(abstract_model(config), tensors, nnx.Variable)


def configuration(path: str | os.PathLike) -> Config:
    """The configuration of the model in a directory; errors as in `trained_on`."""
    return _read(pathlib.Path(path) / "model.json", _from_description)


def _check_tensors(path: pathlib.Path, expected: dict, tensors: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless the tensors have the expected names, shapes and types, and are finite."""
    if wrong := _misfits(expected, tensors):
        raise ValueError(f"{path}: parameters do not fit model.json; missing, unexpected or misshapen: {wrong}.")
    unfit = [f"{name} ({tensors[name].dtype})" for name in expected if not _has_type_of(expected[name], tensors[name])]
    unfit += [f"{name} (NaN or infinity)" for name in expected if not logical.is_finite(tensors[name])]
    if unfit:
        raise ValueError(
            f"{path}: parameters must be floating-point numbers, and finite; save the model again. These are not: "
            f"{errors.listed(unfit)}."
        )


def _misfits(expected: dict, tensors: dict[str, np.ndarray]) -> str:
    """The names of the tensors that are missing, unexpected or of another shape; "" if there are none."""
    wrong = sorted(
        name
        for name in expected.keys() | tensors.keys()
        if name not in expected or name not in tensors or expected[name].shape != tensors[name].shape
    )
    return errors.listed(map(errors.word, wrong))


def _expected(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the parameters of a model of this configuration."""
    return jax.eval_shape(lambda: logical.to_logical(config.build(Keys(0)), nnx.Variable))


def _configuration(found: dict) -> tuple[Config, dict[str, jax.ShapeDtypeStruct], str]:
    """The configuration, the shapes of its model's parameters, and the digest of the description."""
    config = _from_description(found)
    return config, _expected(config), _digest(found)


def _has_type_of(expected: jax.ShapeDtypeStruct, tensor: np.ndarray) -> bool:
    """Whether a tensor has the expected type, or both types are floating point."""
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (expected.dtype, tensor.dtype))
    return floating or expected.dtype == tensor.dtype


def trained_on(path: str | os.PathLike) -> TrainedOn:
    """The training data of the model in a directory; unknown if an earlier version saved it.

    Raises:
      FileNotFoundError: there is no saved model in the directory.
      ValueError: model.json is damaged.
    """
    return _read(pathlib.Path(path) / "model.json", lambda found: from_json(found.get(TRAINED_ON, {})))


def _read(path: pathlib.Path, parse: Callable[[dict], T]) -> T:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: is not a saved model; there is no {path.name}.")
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged, or of another version: {errors.reason(error)}.") from error


def _described(config) -> dict:
    """A configuration as JSON values.  It may be nested, as in a masked autoencoder."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    nested = {name: _described(value) for name, value in fields.items() if dataclasses.is_dataclass(value)}
    return {"kind": zoo.kind(config), **fields, **nested}


def _digest(description: dict) -> str:
    """A digest that is independent of JSON formatting."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _from_description(stored: dict):
    stored = {name: value for name, value in stored.items() if name != TRAINED_ON}
    nested = {name: _from_description(value) for name, value in stored.items() if isinstance(value, dict)}
    fields = {**stored, **nested}
    if "replaced" in fields:
        fields["replaced"] = from_saved(fields["replaced"])
    return zoo.CONFIGS[fields.pop("kind")](**fields)
