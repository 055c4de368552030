"""Trainings with several seeds, and whether the difference of two means is resolved.

No gain is claimed unless it exceeds the spread over seeds.  A difference is resolved when it is larger than twice the
combined standard error of the two means.
"""

import argparse
import json
import math
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
from experiments import findings, flags

# A few epochs of a small model need no regularisation.
SMALL = ["batch_size=64", "model.drop_path=0.0", "data.augment.rand_augment=None", "objective.mixup=0.0"]
SMALL += ["objective.cutmix=0.0", "data.workers=0"]
QUIET = ["log.to=()", "evaluation.every_epochs=None"]
CIFAR10 = ["data.train_examples=10000", "data.eval_examples=2000"]
Rows = Mapping[str, Mapping[str, Any]]  # values of each figure by the name of the variant


def parser(description: str, script: str, *, epochs: bool = True) -> argparse.ArgumentParser:
    """`flags.parser` with the flags of such a training; runs lie in runs/<script>.

    `epochs` is False for a script whose trainings have a number of steps.
    """
    options = flags.parser(description, script)
    options.add_argument("--source", help="in place of the config's, such as npz:<file>")
    if epochs:
        options.add_argument("--epochs", type=int, help="in place of the config's")
    options.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options.add_argument("--seeds", default=[0, 1, 2], type=flags.each_at_least(0), help="with commas between (0,1,2)")
    options.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs") / pathlib.Path(script).stem)
    return options


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None, sets: Iterable[str]) -> argparse.Namespace:
    """Parse `arguments` with the flag --data, one of `sets`, which is also the default entry of the JSON file."""
    options.set_defaults(entry=None)
    options.add_argument("--data", choices=sets, required=True, help="the default entry of the JSON file")
    parsed = options.parse_args(arguments)
    parsed.entry = parsed.entry or parsed.data
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


def by_seed(reports: Iterable[Mapping[str, float]], figures: Mapping[str, str]) -> dict[str, list[float]]:
    """The values of each of `figures`, which has its key in a report, one for each seed."""
    found = list(reports)
    return {figure: [one[key] for one in found] for figure, key in figures.items()}


def aggregate(options: argparse.Namespace, file: str, overrides: Sequence[str], name: str) -> dict:
    """`reports` at --epochs, one of them warm-up; mean, spread and values of each figure."""
    overrides = [*overrides, *([f"epochs={options.epochs}", "schedule.warmup_epochs=1"] if options.epochs else [])]
    found = reports(options, file, overrides, name)
    return train.aggregate(found) | {"epochs": configs.load(file, [*overrides, *options.override]).epochs}


def trained(config: ConfigDict, workdir: pathlib.Path) -> dict[str, float]:
    """The final figures of a run, which is resumed unless it is finished."""
    report = workdir / "report.json"
    if report.is_file():
        before = configs.flat(configs.plain(configs.from_json(workdir / "config.json")))
        if all(before.get(key) == value for key, value in configs.flat(configs.plain(config)).items()):
            return json.loads(report.read_text())
    try:
        found = train.train(config, workdir)
    finally:
        jax.clear_caches()  # a run compiles programs of its own
    if found is None:
        raise SystemExit("stopped by SIGTERM; the same command resumes")
    return found


def at_start(config, place) -> dict[str, float]:
    """The scores of frozen features before training, cached beside the run."""

    def evaluate():
        started = loader.complete(config, loader.evaluate(config.data, batch_size=config.batch_size))
        mesh = sharding.create_mesh(started.mesh)
        with jax.set_mesh(mesh):
            run = build.make_program(started, mesh, total=100, per_epoch=10)
            model = run.exported(run.init(warm_start.initial_parameters(started, build.model_configuration(started))))
            results = runner.scalars(runner.evaluate(model, started, started.evaluation.suite))
        jax.clear_caches()
        return results

    return findings.cached(place.with_name(f"{place.name}_begun.json"), evaluate)


def planned(path: pathlib.Path, settings: Mapping[str, Any], compute: Callable[[], Any], *, keep: bool = True) -> Any:
    """The plan of the runs beside the file `path`: read from it, or computed and, unless `keep` is False, written.

    Raises ValueError when the runs were begun with other settings.
    """
    settings = json.loads(json.dumps(settings))
    known = findings.read_json(path)
    if known and (other := sorted(key for key in settings if settings[key] != known["settings"].get(key))):
        changes = ", ".join(f"{key}={known['settings'].get(key)!r}" for key in other)
        again = f"were begun with {changes}; give the same again, or another --workdir."
        raise ValueError(f"--workdir: the runs in {path.parent} {again}")
    plan = known["plan"] if known else json.loads(json.dumps(compute()))
    if keep and not known:
        files.write_text(path, json.dumps(dict(settings=settings, plan=plan), indent=1) + "\n")
    return plan


def decoded(data: ConfigDict, split: str) -> dict[str, np.ndarray]:
    """All images and labels of a split as arrays, "image" and "label"; without padding and unreadable ones."""
    batches = list(loader.evaluate(data, batch_size=64, split=split).batches())
    real = np.concatenate([batch["weight"] for batch in batches]) > 0
    return {kind: np.concatenate([batch[kind] for batch in batches])[real] for kind in ("image", "label")}


def difference(a: Sequence[float], b: Sequence[float]) -> dict[str, float | None]:
    """mean(a) - mean(b), "gap", and its "standard_error"; None where one has a single value."""
    gap = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return dict(gap=gap, standard_error=None)
    return dict(gap=gap, standard_error=math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b)))


def gains(rows: Rows, pairs: Iterable[tuple[str, str | None]], figures: Iterable[str]) -> dict[str, dict]:
    """The difference between the two rows of each pair, in each figure that both have."""
    return {
        f"{name} - {other}, {figure}": difference(rows[name][figure], rows[other][figure])
        for name, other in pairs
        if name in rows and other in rows
        for figure in figures
        if rows[name][figure] and rows[other][figure]
    }


def conclude(
    options, rows: Rows, columns: Mapping[str, str], pairs: Iterable[tuple], figures: Iterable[str], **settings
) -> None:
    """Print the rows, write them, and do both with the `gains` of the pairs in the figures."""
    gained = gains(rows, pairs, figures)
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


def verdict(gap: float, standard_error: float | None) -> str:
    """A difference in points, and whether the seeds resolve it."""
    if standard_error is None:
        return f"{100 * gap:+.2f} points; one seed resolves nothing"
    resolved = "" if abs(gap) > 2 * standard_error else "not "
    return f"{100 * gap:+.2f} points, standard error {100 * standard_error:.2f}: {resolved}resolved"


def show(rows: Rows, columns: Mapping[str, str], gains: Mapping[str, Mapping], more: Mapping[str, str] = {}) -> None:
    """Print the rows, as spreads in `columns` and unchanged in the columns of `more`, and the gains."""
    cells = [{**row, "name": name, **{key: spread(row[key]) for key in columns}} for name, row in rows.items()]
    print(findings.table(cells, dict(name="", **columns, **more)))
    for name, gain in gains.items():
        print(f"{name}: {verdict(gain['gap'], gain['standard_error'])}")
