"""Flags and steps that scripts about the cost of models share."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from equivit import costs
from experiments import flags, timing
from experiments.compiled_models import Compiled


def parser(
    description: str, script: str, *, models: Sequence[str], precisions: Sequence[str], batch: int = 64
) -> argparse.ArgumentParser:
    """`flags.timing_parser` with the models (default: all), the batch, the precision (the first), and --quick."""
    options = flags.timing_parser(description, script)
    options.add_argument("--models", type=flags.one_of(models), default=list(models), help="in this order")
    options.add_argument("--batch", type=flags.at_least(1), default=batch, help="images (%(default)s)")
    options.add_argument("--precision", choices=precisions, default=precisions[0], help="(%(default)s)")
    options.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Those flags as they are stored with the results."""
    return {key: getattr(options, key) for key in ("batch", "precision", "runs", "quick")}


def note(options: argparse.Namespace, text: str) -> str:
    """The end of a line above a table: a text, or that models are tiny."""
    return "  TINY MODELS: the figures mean nothing" if options.quick else f"; {text}"


def attempt(budget: timing.Budget, name: str, measure: Callable, *given) -> Any:
    """`measure(*given)`; None where no time is left, or it failed, which the budget records."""
    if budget.allows(name):
        with budget.trying(name):
            return measure(*given)
    return None


def seconds(programs: Mapping[Any, Compiled], options: argparse.Namespace) -> dict[Any, float]:
    """The median seconds of programs that are timed in turn; `options` has `runs` and `warmup`."""
    calls = {name: program.start() for name, program in programs.items()}
    return timing.medians(timing.interleaved(calls, warmup=options.warmup, runs=options.runs))


def counted(model: Any) -> costs.Costs:
    """The costs of a model, which may be abstract, for one image."""
    image = jax.ShapeDtypeStruct((1, *model.config.input_shape), jnp.float32)
    return costs.count(lambda model, images: model(images), model, image)
