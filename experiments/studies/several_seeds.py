"""Trainings with several seeds, and tables of what came out."""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit import files, train
from equivit.data import loader
from equivit.evaluation import runner
from equivit.training import build, sharding, warm_start
from equivit.training import config as configs
from equivit.training.run import resuming
from experiments import compiled_models, findings, flags, timing
from experiments.studies import differences
from experiments.studies.differences import Rows

# A few epochs of a small model need no regularisation.
SMALL = ["batch_size=64", "model.drop_path=0.0", "data.augment.rand_augment=None", "objective.mixup=0.0"]
SMALL += ["objective.cutmix=0.0", "data.workers=0"]
QUIET = ["log.to=()", "evaluation.every_epochs=None"]
CIFAR10 = ["data.train_examples=10000", "data.eval_examples=2000"]
TRAINING = ("optimizer.", "schedule.", "epochs", "steps", *resuming.SILENT)  # keys without effect before training


def parser(description: str, script: str, *, epochs: bool = True, source: bool = True) -> argparse.ArgumentParser:
    """`flags.parser` with the flags of such a training, for `parse`.

    `epochs` is False for a script whose trainings have a number of steps, `source` for one with flags for each set.
    """
    options = flags.parser(description, script)
    if source:
        options.add_argument("--source", help="in place of the config's, such as npz:<file>")
    if epochs:
        options.add_argument("--epochs", type=flags.at_least(1), help="in place of the config's")
    options.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options.add_argument("--seeds", default=[0, 1, 2], type=flags.each_at_least(0), help="with commas between (0,1,2)")
    options.add_argument("--workdir", type=pathlib.Path, help="directory of the runs (runs/<script>/<entry>)")
    return options


def parse(
    options: argparse.ArgumentParser, arguments: Sequence[str] | None, sets: Iterable[str] | None = None
) -> argparse.Namespace:
    """Parse `arguments`; by default each entry of the JSON file has its own runs, in runs/<script>/<entry>.

    With `sets` there is the flag --data, one of them, which is also the default entry.
    """
    if sets is not None:
        options.set_defaults(entry=None)
        options.add_argument("--data", choices=sets, required=True, help="the default entry of the JSON file")
    parsed = options.parse_args(arguments)
    parsed.entry = parsed.entry or parsed.data
    script = pathlib.Path(options.get_default("output")).stem
    parsed.workdir = parsed.workdir or pathlib.Path("runs") / script / parsed.entry
    return parsed


def reports(options: argparse.Namespace, file: str, overrides: Sequence[str], name: str) -> dict[int, dict]:
    """Train one variant with every seed, or resume its runs; the final figures by seed."""
    overrides = [*overrides, *QUIET, *source(options), *options.override]
    return {
        seed: trained(configs.load(file, [*overrides, f"seed={seed}"]), options.workdir / name / f"seed_{seed}")
        for seed in options.seeds
    }


def source(options: argparse.Namespace) -> list[str]:
    """The override of --source."""
    return [f"data.source={options.source}"] if options.source else []


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """--override and the name of the file of --source, for the JSON file."""
    return dict(overrides=options.override, source=options.source and pathlib.PurePath(options.source).name)


def length_in_epochs(number: int, warmup: float = 1) -> list[str]:
    """The overrides of a run of `number` epochs, `warmup` of them warm-up, at most half."""
    return [f"epochs={number}", f"schedule.warmup_epochs={min(warmup, number / 2):g}"]


def length_in_steps(number: int, warmup: int) -> list[str]:
    """The overrides of a run of `number` steps, of which 1 in `warmup` is warm-up; the loss is logged 50 times."""
    length = [f"steps={number}", "epochs=None", "schedule.warmup_epochs=None"]
    return [*length, f"schedule.warmup_steps={number // warmup}", f"log.every_steps={max(1, number // 50)}"]


def step_seconds(made: Mapping[str, ConfigDict]) -> dict[str, float]:
    """The median time of a training step of each config, measured in turn."""
    calls = {name: compiled_models.training_step(config).start() for name, config in made.items()}
    return timing.medians(timing.interleaved(calls, warmup=3, runs=25))


def by_seed(reports: Iterable[Mapping[str, float]], figures: Mapping[str, str]) -> dict[str, list[float]]:
    """The values of each of `figures`, which has its key in a report, one for each seed."""
    found = list(reports)
    return {figure: [one[key] for one in found] for figure, key in figures.items()}


def aggregate(options: argparse.Namespace, file: str, overrides: Sequence[str], name: str) -> dict:
    """`reports` at --epochs; mean, spread and values of each figure."""
    overrides = [*overrides, *(length_in_epochs(options.epochs) if options.epochs else [])]
    found = reports(options, file, overrides, name)
    return train.aggregate(found) | {"epochs": configs.load(file, [*overrides, *options.override]).epochs}


def trained(config: ConfigDict, workdir: pathlib.Path) -> dict[str, float]:
    """The final figures of a run, which is resumed unless it is finished.

    Raises ValueError if the run was begun with another recipe, or for another number of steps: training would keep its
    parameters.  It may be evaluated in another way.
    """
    if resuming.is_finished(workdir, config):
        return json.loads((workdir / resuming.REPORT).read_text())
    if (before := resuming.config_before(workdir)) is not None:
        check_same(f"the run in {workdir} was", *(_recipe(one, before) for one in (before, config)))
    try:
        found = train.train(config, workdir)
    finally:
        jax.clear_caches()  # a run compiles programs of its own
    if found is None:
        raise SystemExit("stopped by SIGTERM; the same command resumes")
    return found


def _recipe(config: ConfigDict, before: ConfigDict) -> dict[str, Any]:
    """The keys that decide on the trained parameters; the model has all keys of the run `before`, and its data's."""
    known = {key: before.model[key] if key in resuming.OF_DATA else None for key in before.model}
    values = configs.flat(configs.plain(ConfigDict({**config, "model": {**known, **config.model}})))
    return {key: value for key, value in values.items() if not key.startswith(resuming.HARMLESS)}


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError if settings differ from those before; `what` is such as "the runs in <directory> were"."""
    if other := sorted(key for key in now if before.get(key) != now[key]):
        changes = ", ".join(f"{key}={before[key]!r}" if key in before else f"the default of {key}" for key in other)
        raise ValueError(f"--workdir: {what} begun with {changes}; give the same again, or another --workdir.")


def at_start(config, place) -> dict[str, float]:
    """The scores of frozen features before training, kept beside the run with the settings they depend on."""
    path, settings = place.with_name(f"{place.name}_begun.json"), configs.flat(configs.plain(config))
    settings = {key: value for key, value in settings.items() if not key.startswith(TRAINING)}
    return findings.cached(path, lambda: _scores_at_start(config), settings)


def _scores_at_start(config) -> dict[str, float]:
    started = loader.complete(config, loader.evaluate(config.data, batch_size=config.batch_size))
    mesh = sharding.create_mesh(started.mesh)
    with jax.set_mesh(mesh):
        run = build.make_program(started, mesh, total=100, per_epoch=10)
        model = run.exported(run.init(warm_start.initial_parameters(started, build.model_configuration(started))))
        results = runner.scalars(runner.evaluate(model, started, started.evaluation.suite))
    jax.clear_caches()
    return results


def planned(path: pathlib.Path, settings: Mapping[str, Any], compute: Callable[[], Any], *, keep: bool = True) -> Any:
    """The plan of the runs beside the file `path`: read from it, or computed and, unless `keep` is False, written.

    Raises ValueError when the runs were begun with other settings.
    """
    settings = json.loads(json.dumps(settings))
    known = findings.read_json(path)
    if known:
        check_same(f"the runs in {path.parent} were", known["settings"], settings)
    plan = known["plan"] if known else json.loads(json.dumps(compute()))
    if keep and not known:
        files.write_text(path, json.dumps(dict(settings=settings, plan=plan), indent=1) + "\n")
    return plan


def decoded(data: ConfigDict, split: str) -> dict[str, np.ndarray]:
    """All images and labels of a split as arrays, "image" and "label"; without padding and unreadable ones."""
    batches = list(loader.evaluate(data, batch_size=64, split=split).batches())
    real = np.concatenate([batch["weight"] for batch in batches]) > 0
    return {kind: np.concatenate([batch[kind] for batch in batches])[real] for kind in ("image", "label")}


def conclude(
    options, rows: Rows, columns: Mapping[str, str], pairs: Iterable[tuple], figures: Iterable[str], **settings
) -> None:
    """Print the rows, write them, and do both with the `gains` of the pairs in the figures."""
    gained = differences.gains(rows, pairs, figures)
    show(rows, columns, gained)
    findings.write(options, dict(rows=rows, gains=gained, **settings))


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation (n - 1) in percent."""
    if len(values) < 2:
        return f"{100 * values[0]:.1f}" if values else "-"
    return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f}"


def errorbar(axes, x: float, values: Sequence[float], **style: Any) -> None:
    """Draw the mean and the standard deviation of accuracies, in percent, at a place."""
    percent = [100 * value for value in values]
    error = statistics.stdev(percent) if len(percent) > 1 else 0
    axes.errorbar(x, statistics.fmean(percent), yerr=error, capsize=3, linestyle="", **style)


def show(rows: Rows, columns: Mapping[str, str], gains: Mapping[str, Mapping], more: Mapping[str, str] = {}) -> None:
    """Print the rows, as spreads in `columns` and unchanged in the columns of `more`, and the gains."""
    cells = [{**row, "name": name, **{key: spread(row[key]) for key in columns}} for name, row in rows.items()]
    print(findings.table(cells, dict(name="", **columns, **more)))
    for name, gain in gains.items():
        print(f"{name}: {differences.verdict(gain)}")
