"""Shared parts of commands with several stages: each stage is stored, and skipped when its result exists."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import command, errors, files, logical, train
from equivit.models import saved
from equivit.models.model import ModelModule
from equivit.trained_on import UNKNOWN, TrainedOn
from equivit.training import checkpoints, loading
from equivit.training.run import lock

ARGUMENTS = "arguments.json"


def saved_model(
    place: pathlib.Path,
    make: Callable[[], ModelModule],
    data: TrainedOn = UNKNOWN,
    *,
    beside: pathlib.Path | None = None,
) -> ModelModule:
    """Load the saved model at a place; compute it if it, or the file `beside` it, is missing.

    A computed model is saved with `data`, its training data.
    """
    if not (place / "model.json").is_file() or (beside is not None and not beside.is_file()):
        saved.save(place, make(), data)
    try:
        return saved.load(place)
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(error).rstrip('.')}; remove {place} to create it again.") from error


def trained_on(place: str, model: ModelModule) -> TrainedOn:
    """The training data of the weights at a place (`loading.load_model`), without classes if the model has others."""
    data = loading.trained_on(place)
    named = len(data.classes) == getattr(model.config, "num_classes", None)
    return data if named else data._replace(classes=(), examples=None)


def trained(config: ConfigDict, place: pathlib.Path, init: pathlib.Path) -> ModelModule:
    """Train a model that starts from a saved one; a finished run is not trained again."""
    if not (place / "report.json").is_file():
        config = config.copy_and_resolve_references().unlock()
        config.init = str(init)
        command.say(f"{place.name}: {place}")
        train.train(config.lock(), place)
    return checkpoints.load_run(place).model


def fingerprint(model: ModelModule) -> str:
    """Compute the SHA-256 digest of a model's tensors, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(logical.to_logical(model, nnx.Variable).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.asarray(tensor).tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def claimed(options: Any, decisions: Iterable[str], changes: Iterable[str], weights: str) -> Iterator[None]:
    """Hold the lock of the command's directory, which belongs to these arguments (`claim`), while stages run."""
    with lock.held(options.workdir / ".lock"):
        claim(options, decisions, changes, weights)
        yield


def claim(options: Any, decisions: Iterable[str], changes: Iterable[str], weights: str) -> None:
    """Write the arguments of a command into its directory, with the `fingerprint` of the loaded model as weights.

    Args:
      options: with `workdir`, `config`, `weights`, `input` and the `decisions`.
      decisions: names of further arguments that decide on the stages.
      changes: overrides of the config.

    Raises ValueError if the directory belongs to other arguments or other weights (the file at a path may change), or
    has stages without a record of both.
    """
    source = options.weights or str(options.input)
    wanted = dict(source=source, config=options.config, changes=list(changes))
    wanted = json.loads(json.dumps(wanted | {name: getattr(options, name) for name in decisions}))
    path = options.workdir / ARGUMENTS
    if path.is_file():
        before = files.read_json(path)
        for name, value in wanted.items():
            if before.get(name) != value:
                raise ValueError(
                    f"--workdir={options.workdir} was begun with {name}={errors.shown(before.get(name))}, not "
                    f"{errors.shown(value)}; give that value, or another --workdir."
                )
        if before.get("weights") != weights:
            raise ValueError(
                f"--workdir={options.workdir} was begun with other weights than {source} contains now; give another "
                "--workdir."
            )
    elif (options.workdir / "config.json").is_file():
        raise ValueError(f"--workdir={options.workdir}: this is the directory of a training run; give another one.")
    elif (options.workdir / "start").is_dir():
        raise ValueError(
            f"--workdir={options.workdir} has stages, but no {ARGUMENTS} with what they were computed from; give "
            "another --workdir."
        )
    else:
        files.write_text(path, json.dumps(dict(wanted, weights=weights), indent=1) + "\n")
