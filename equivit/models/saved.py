"""A model on disk: a directory with `model.json`, its configuration, and `parameters.safetensors`.

Parameters and running statistics are stored as logical tensors (`logical.py`), so a file does not depend on how layers
and irreps are stacked in memory.
"""

import dataclasses
import json
import pathlib

import jax
from flax import nnx

from equivit import errors, files, logical, safetensors_files
from equivit.layers.keys import Keys
from equivit.models import zoo
from equivit.models.model import Config, ModelModule


def save(path: pathlib.Path, model: ModelModule) -> None:
    """Write the model to the directory `path`, which is created if needed."""
    tensors = jax.device_get(logical.to_logical(model, nnx.Variable))
    with files.replacing_in_directory(path, ("parameters.safetensors", "model.json")) as unfinished:
        safetensors_files.write(unfinished / "parameters.safetensors", tensors)
        files.write_text(unfinished / "model.json", json.dumps(_described(model.config), indent=1) + "\n")


def load(path: pathlib.Path) -> nnx.Module:
    """The model that `save` wrote.

    Raises:
      FileNotFoundError: there is no saved model in the directory.
      ValueError: a file is damaged, a tensor is of a type that is not read, or the parameters are not those of the
        configuration.
    """
    path = pathlib.Path(path)
    config = _configuration(path / "model.json")
    if not (path / "parameters.safetensors").is_file():
        raise FileNotFoundError(f"{path}: has a model.json, but no parameters.safetensors.")
    tensors = safetensors_files.read(path / "parameters.safetensors")
    expected = jax.eval_shape(lambda: logical.to_logical(_create(config), nnx.Variable))
    wrong = sorted(
        name
        for name in expected.keys() | tensors.keys()
        if name not in expected or name not in tensors or expected[name].shape != tensors[name].shape
    )
    if wrong:
        names = errors.listed(wrong)
        raise ValueError(f"{path}: parameters do not fit model.json; missing, unexpected or misshapen: {names}.")
    return logical.from_logical(jax.eval_shape(lambda: _create(config)), tensors, nnx.Variable)


def _create(config: Config) -> nnx.Module:
    return config.build(Keys(0))


def _configuration(path: pathlib.Path) -> Config:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: is no saved model; there is no {path.name}.")
    try:
        return _from_description(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}".rstrip(".")
        raise ValueError(f"{path}: is damaged, or of another version: {what}.") from error


def _described(config) -> dict:
    """A configuration as JSON values.  It may contain another, as a masked autoencoder's contains its encoder's."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    nested = {name: _described(value) for name, value in fields.items() if dataclasses.is_dataclass(value)}
    return {"kind": zoo.kind(config), **fields, **nested}


def _from_description(stored: dict):
    nested = {name: _from_description(value) for name, value in stored.items() if isinstance(value, dict)}
    fields = {**stored, **nested}
    return zoo.CONFIGS[fields.pop("kind")](**fields)
