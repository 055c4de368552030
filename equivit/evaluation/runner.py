"""Runs protocols by name on the evaluation split of a config."""

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
    model: nnx.Module,
    config: ConfigDict,
    suite: Iterable[str] | str | None,
    *,
    track: Track | None = None,
    directory: pathlib.Path | None = None,
    classes: Sequence[str] = (),
) -> dict[str, dict]:
    """Run protocols on the evaluation split of `config.data`.

    Under a mesh (`jax.set_mesh`) batches are split over all its devices; every process gets the results.

    Args:
      model: offers what the protocols need (`protocol.offers`); its arrays are on the mesh, if there is one.
      config: of the run; `data`, `evaluation`, `precision`, `batch_size` and `seed` are used.
      suite: as in `check`.
      track: shows progress; `track(batches, total, name)` yields the batches.
      directory: where long protocols keep their state, so that an interrupted evaluation can resume; None: nowhere.
      classes: names of the model's classes; the data must have the same names.  (): not known, nothing is compared.

    Returns:
      The results of each protocol by its name; the protocol's file describes them.

    Raises:
      ValueError: as `check`, or the model does not fit the data, or the corruption library is missing.
      FileNotFoundError: the data are missing.
    """
    runs = prepare(model, config, suite, track=track, directory=directory, classes=classes)
    return {name: run.protocol.run(run) for name, run in runs.items()}


def prepare(
    model: nnx.Module,
    config: ConfigDict,
    suite: Iterable[str] | str | None,
    *,
    track: Track | None = None,
    directory: pathlib.Path | None = None,
    classes: Sequence[str] = (),
) -> dict[str, Run]:
    """The inputs of `evaluate` by protocol, after opening all data; `model` may be abstract.

    Raises as `evaluate` does, so that a run that will end with an evaluation fails before it begins.
    """
    suite = check(suite, config, model)
    blocks = max((PROTOCOLS[name].blocks(config) for name in suite), default=1)
    shared: dict[str, Any] = dict(blocks=blocks, frozen={}, directory=directory, classes=tuple(classes))
    runs = {name: Run(model, config, PROTOCOLS[name], config.data, name, track, **shared) for name in suite}
    for run in runs.values():
        run.protocol.opens(dataclasses.replace(run, data=run.protocol.data(config)))
    return runs


def check(suite: Iterable[str] | str | None, config: ConfigDict, model: nnx.Module | None = None) -> tuple[str, ...]:
    """The names of a suite's protocols, after checking that they can run.

    Args:
      suite: names of `PROTOCOLS`, as a list or separated by commas; None: the default protocols that fit the model,
        possibly none.
      config: of the run.
      model: may be abstract; None: not known yet, so its needs are not checked, and a suite of None is empty.

    Raises:
      ValueError: no name, an unknown name, or a protocol that cannot run on this config or this model.
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
    """The single numbers among the results, such as "orientation/rotated", for logs and for statistics over seeds."""
    return {
        f"{protocol}/{name}": float(value)
        for protocol, figures in results.items()
        for name, value in figures.items()
        if isinstance(value, int | float)
    }


def curves() -> list[str]:
    """The metrics of a run that are plotted over its steps, such as "eval/accuracy/top1", of all protocols."""
    return [f"eval/{name}/{protocol.curve}" for name, protocol in PROTOCOLS.items() if protocol.curve]


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
