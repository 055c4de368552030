"""Train one recipe with several values of some keys, and compare the runs.

    python -m equivit.sweep --config=configs/cifar.py:10,I8 --workdir=runs/sweep \\
        --sweep.schedule.lr=1e-3,3e-4 --sweep.seed=0,1,2 --config.data.source=npz:cifar10.npz

Each combination is a run in a directory of its own, such as runs/sweep/lr=1e-3,seed=0.  Finished runs are not trained
again, so the same command resumes a sweep.  A run whose loss is not finite is left out.  At the end comparison.md, .csv
and .png compare all runs, as `python -m equivit.compare runs/sweep` does.

configs/timeseries.py has its own lists of values and needs no --sweep: it trains models for time series with several
learning rates and dropout rates as one program, and reports the best run and the mean.

    python -m equivit.sweep --config=configs/timeseries.py --workdir=runs/timeseries \\
        --config.data.directory=/data/ucr --config.data.names=Crop,MelbournePedestrian --config.patches="(8,)"

There each result, for one data set, number of patches and model, is written to --workdir at once.  Existing results are
not recomputed, so the same command resumes a sweep.  Missing data sets are skipped and listed at the end.
`experiments/tables/jumbo/timeseries.py` makes the tables.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from equivit import command, errors
from equivit.training import sweep_grid

if TYPE_CHECKING:
    import numpy as np

    from equivit.data.series import SeriesData
    from equivit.training import sweep_program

LISTS = "--sweep."


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    example = (
        "Any key of the config can be changed, --config.KEY=VALUE, or take several values, --sweep.KEY=VALUE,VALUE"
    )
    parser = command.parser("sweep", __doc__, epilog=example)
    parser.add_argument("--config", required=True, help=command.CONFIG)
    results = "directory of the results; resumes the sweep in it"
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help=results)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    from equivit import train
    from equivit.training import config as configs
    from equivit.training import sweep_config

    train.run_steps_in_this_thread()
    if lists := [argument for argument in rest if argument.startswith(LISTS)]:
        others = command.changes([argument for argument in rest if argument not in lists], _parser())
        train_grid(options.config, others, command.changes(lists, _parser(), LISTS), options.workdir)
        return
    config = configs.load(options.config, command.changes(rest, _parser()), schema=sweep_config.SCHEMA)
    results = run(config, options.workdir)
    print(f"{len(results)} results: {options.workdir}", flush=True)


def train_grid(path: str, changes: list[str], lists: list[str], workdir: pathlib.Path) -> None:
    """Train a config with every combination of the values in `lists`, such as "seed=0,1,2", and compare the runs.

    Raises:
      ValueError: a key or a value does not fit, or a finished run has another recipe, before anything is trained; or
        the weights at `config.init` do not fit, when their run begins; or losses were not finite, at the end.
      FileNotFoundError: data or files of weights are missing, before anything is trained.
    """
    from equivit import train
    from equivit.training import comparison, loading
    from equivit.training import config as configs

    runs = {name: configs.load(path, [*changes, *values]) for name, values in sweep_grid.runs(lists).items()}
    waiting = train.unfinished(runs, workdir)
    for name, config in waiting.items():
        train.prepare(config)
        if config.init is not None and not (workdir / name / "checkpoints").is_dir():
            loading.check_exists(config.init)
    reports = train.train_all(runs, waiting, workdir)
    if reports:
        command.say(comparison.write(comparison.recipes([workdir / name for name in reports]), workdir))
    train.check_reports(runs, reports)
    command.say(f"Done: {len(runs)} runs, {', '.join(str(workdir / file) for file in comparison.FILES)}")


def run(config: ConfigDict, workdir: pathlib.Path) -> list[dict]:
    """Read all results of a sweep from `workdir`, or compute them; missing data sets are skipped.

    Raises:
      ValueError: a result in `workdir` has another recipe or is damaged, or another process is computing it.
      Missing: all data sets are missing.
    """
    from equivit.data.series_formats import Missing

    results, missing = [], {}
    for name in config.data.names:
        try:
            results.extend(_of_set(config, workdir, name))
        except Missing as error:
            missing[name] = error
            if len(config.data.names) > 1:  # otherwise the error below says it
                print(f"left out: {error}", flush=True)
    if missing and not results:
        raise next(iter(missing.values()))
    if missing:
        print(f"left out, since their data are not there: {', '.join(missing)}", flush=True)
    return results


def _of_set(config: ConfigDict, workdir: pathlib.Path, name: str) -> Iterator[dict]:
    """Yield the results of one data set; its data are read before the first computation."""
    from equivit import files
    from equivit.data import series
    from equivit.training.run import lock

    section, data = config.data, None
    for patches, model in itertools.product(config.patches, config.models):
        path = workdir / f"{name}-{model}-{patches}.json"
        if path.is_file():
            yield _stored(path, config)
            continue
        data = data or series.load(
            name, directory=section.directory, normalize=section.normalize, seed=section.split_seed
        )
        with lock.held(path.with_suffix(".lock")):  # other processes may compute other results here
            result = _trained(config, data, model, patches)
            files.write_text(path, json.dumps(result, indent=1) + "\n")
        _say(result)
        yield result


def _trained(config: ConfigDict, data: "SeriesData", name: str, patches: int) -> dict:
    """Train one model on one data set with all rates, and return the result."""
    import jax
    import numpy as np

    from equivit import logical
    from equivit.layers.rngs import Keys
    from equivit.models import zoo
    from equivit.training import sweep_config, sweep_program

    _, length, channels = data.train.series.shape
    sizes = dict(length=length, channels=channels, num_classes=len(data.classes), patches=patches)
    model: Any = zoo.configuration(name, **sizes, **config.model)
    make, examples = model.build, len(data.train.labels)
    epochs = sweep_config.epochs(config, data.name, examples)
    runs = sweep_program.grid(config.runs.lr, config.runs.dropout, config.seed)
    print(f"{data.name}: {name}, {patches} patches of {model.patch_length} steps, {epochs} epochs", flush=True)
    program = sweep_program.Sweep(config, make, examples=examples, epochs=epochs)
    start = time.monotonic()
    state, figures = sweep_program.train(program, runs, data, epochs=epochs, seed=config.seed, report=_Progress(epochs))
    figures = jax.device_get(figures)
    best, rows = sweep_program.best(figures["validation"]), _rows(config, figures, np.asarray(state.good))
    weights = jax.eval_shape(lambda: logical.take(make(Keys(0))))
    return dict(
        data=data.name,
        model=name,
        patches=patches,
        patch_length=model.patch_length,
        **{key: sizes[key] for key in ("length", "channels", "num_classes")},
        registers=model.registers,
        examples={split: len(getattr(data, split).labels) for split in ("train", "validation", "test")},
        epochs=epochs,
        best=rows[best] | dict(run=best),
        test_mean=float(np.mean(figures["test"].accuracy)),
        runs=rows,
        parameters=sum(int(np.prod(a.shape)) for a in weights.values()),
        recipe=sweep_config.recipe(config),
        seconds=round(time.monotonic() - start, 1),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
    )


def _rows(config: ConfigDict, figures: "dict[str, sweep_program.Figures]", good: "np.ndarray") -> list[dict]:
    """The results of each run; `finite` is False if a loss or gradient was not finite."""
    rows = []
    for k, (lr, dropout) in enumerate(itertools.product(config.runs.lr, config.runs.dropout)):
        rows.append(dict(lr=lr, dropout=dropout, finite=bool(good[k])))
        for split, values in figures.items():
            rows[-1] |= {split: float(values.accuracy[k]), f"{split}_loss": float(values.loss[k])}
    return rows


class _Progress:
    """Prints progress at most once a minute."""

    def __init__(self, epochs: int, every: float = 60.0):
        self._epochs, self._every, self._last = epochs, every, time.monotonic()

    def __call__(self, epoch: int, losses: "np.ndarray") -> None:
        if (now := time.monotonic()) - self._last >= self._every:
            self._last = now
            print(f"  epoch {epoch + 1} of {self._epochs}, losses {losses.min():.3f} to {losses.max():.3f}", flush=True)


def _stored(path: pathlib.Path, config: ConfigDict) -> dict:
    from equivit import files
    from equivit.training import sweep_config

    result, recipe = files.read_json(path, "recipe"), sweep_config.recipe(config)
    if not isinstance(stored := result["recipe"], dict):
        raise ValueError(f"{path} is damaged, its recipe is {errors.shown(stored)}; remove it to create it again.")
    stored = sweep_config.recipe(sweep_config.get_base()) | stored  # keys that came later had their defaults
    if other := sorted(key for key in stored.keys() | recipe.keys() if stored.get(key) != recipe.get(key)):
        key = other[0]
        raise ValueError(
            f"{path} has another recipe, config.{errors.word(key)}={errors.shown(stored.get(key))} instead of "
            f"{errors.shown(recipe.get(key))}; give another --workdir."
        )
    return result


def _say(result):
    best = result["best"]
    print(
        f"  best run: lr {best['lr']:g}, dropout {best['dropout']:g}, test {100 * best['test']:.1f} % "
        f"(validation {100 * best['validation']:.1f} %); mean of {len(result['runs'])} runs "
        f"{100 * result['test_mean']:.1f} %; {result['seconds']:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
