"""Run protocols by name on the evaluation split of a config."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from equivit import errors
from equivit.evaluation import protocols
from equivit.evaluation.protocol import NEEDS, Protocol, Run, Track, offers

PROTOCOLS: dict[str, Protocol] = protocols.load()


def evaluate(
    model: nnx.Module, config: ConfigDict, suite: Iterable[str] | str | None, **options: Any
) -> dict[str, dict[str, Any]]:
    """Run protocols on the evaluation split of `config.data`; arguments and errors as in `prepare`.

    Under a mesh (`jax.set_mesh`) batches are split over all its devices; the model's arrays are on the mesh, and every
    process gets the results.

    Returns the results of each protocol by its name; the protocol's file describes them.
    """
    return {name: run.protocol.run(run) for name, run in prepare(model, config, suite, **options).items()}


def prepare(
    model: nnx.Module,
    config: ConfigDict,
    suite: Iterable[str] | str | None,
    *,
    track: Track | None = None,
    directory: pathlib.Path | None = None,
    classes: Sequence[str] = (),
) -> dict[str, Run]:
    """Open all data and return the inputs of protocols, so that an unfit evaluation fails before training.

    Args:
      model: a model that meets the protocols' needs (`protocol.offers`); it may be abstract.
      config: the config of the run; `data`, `evaluation`, `precision`, `batch_size` and `seed` are used.
      suite: as in `check`.
      track: shows progress; `track(batches, total, name)` yields the batches.
      directory: directory for the state of long protocols, so that they can resume; None: nothing is stored.
      classes: names of the model's classes, which the data must share; () if unknown.

    Raises:
      ValueError: as `check`; also if the model does not fit the data, or the corruption library is missing.
      FileNotFoundError: the data are missing.
    """
    suite = check(suite, config, model)
    blocks = max((PROTOCOLS[name].blocks(config) for name in suite), default=1)
    shared: dict[str, Any] = dict(blocks=blocks, frozen={}, directory=directory, classes=tuple(classes))
    runs = {name: Run(model, config, PROTOCOLS[name], config.data, name, track, **shared) for name in suite}
    for run in runs.values():
        run.protocol.opens(dataclasses.replace(run, data=run.protocol.data(config)))
    return runs


def check(suite: Iterable[str] | str | None, config: ConfigDict, model: nnx.Module | None = None) -> tuple[str, ...]:
    """Check that the protocols of a suite can run, and return their names.

    Args:
      suite: names of `PROTOCOLS`, as a list or separated by commas; None: the default protocols that fit the model,
        possibly none.
      model: the model, which may be abstract; None: unknown, so needs are not checked, and a suite of None is empty.

    Raises ValueError for no name, an unknown name, or a protocol that cannot run on this config or this model.
    """
    if suite is None:
        suite = () if model is None else tuple(name for name in fitting(model) if PROTOCOLS[name].default)
    else:
        suite = tuple(suite.split(",") if isinstance(suite, str) else suite)
        if not suite:
            raise ValueError(f"evaluation.suite is empty; name some of {', '.join(PROTOCOLS)}.")
    for name in suite:
        if name not in PROTOCOLS:
            known, near = ", ".join(PROTOCOLS), errors.nearest(name, PROTOCOLS)
            raise ValueError(f"evaluation.suite: {errors.shown(name)} is not one of {known}{near}.")
        if model is not None:
            _check_needs(name, model)
        PROTOCOLS[name].check(config)
    return suite


def fitting(model: nnx.Module) -> tuple[str, ...]:
    """The protocols whose needs a model meets."""
    offered = offers(model)
    return tuple(name for name, protocol in PROTOCOLS.items() if protocol.needs <= offered)


def scalars(results: dict[str, dict]) -> dict[str, float]:
    """The scalar results, such as "orientation/rotated", for logs and for statistics over seeds."""
    return {
        f"{protocol}/{name}": float(value)
        for protocol, figures in results.items()
        for name, value in figures.items()
        if isinstance(value, int | float)
    }


def curves() -> list[str]:
    """The metrics of all protocols to plot over the steps of a run, such as "eval/accuracy/top1"."""
    keys = {name: (protocol.loss, protocol.curve) for name, protocol in PROTOCOLS.items()}
    return [f"eval/{name}/{key}" for name in keys for key in keys[name] if key]


def _check_needs(name: str, model: nnx.Module) -> None:
    if not (missing := sorted(PROTOCOLS[name].needs - offers(model))):
        return
    others = ", ".join(map(repr, fitting(model)))
    would_do = f"protocols that fit it: {others}" if others else "no protocol fits it"
    fix = "  A run with config.init=<this run> trains a classifier from it." if "logits" in missing else ""
    raise ValueError(
        f"evaluation.suite: {name!r} is for {' and '.join(NEEDS[need] for need in missing)}, but this "
        f"{type(model).__name__} offers no {' and no '.join(missing)}; {would_do}.{fix}"
    )
