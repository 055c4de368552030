"""Train a model.

    python -m equivit.train --config=configs/quickstart.py --workdir=/tmp/run
    python -m equivit.train --config=configs/quickstart.py:quicktest --workdir=/tmp/run --config.data.workers=2

The same --workdir resumes a run.  Ctrl-C and SIGTERM save the run and exit with status 130 or 143; only a finished run
exits with 0.
"""

import argparse
import contextlib
import copy
import functools
import os
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from equivit import command, errors

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import Mesh

    from equivit.data.loader import TrainPipeline
    from equivit.models.model import Config, ModelModule
    from equivit.objectives.objective import Objective
    from equivit.trained_on import TrainedOn


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    example = "Any key of the config can be changed: --config.data.source=npz:digits.npz --config.epochs=3"
    parser = command.parser("train", "Train a model, or resume a run.", epilog=example)
    parser.add_argument("--config", required=True, help=command.CONFIG)
    parser.add_argument("--workdir", type=pathlib.Path, help="run directory (required); resumes the run in it")
    parser.add_argument("--show", action="store_true", help="print every key of the config and exit")
    parser.add_argument("--seeds", help="one run per seed, such as 0,1,2; report.json then has mean and spread")
    parser.add_argument("--deterministic", action="store_true", help="bit-exact results on GPUs; slower")
    parser.add_argument("--distributed", action="store_true", help="join the other processes of the run")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    from equivit.training import config as configs
    from equivit.training import loop
    from equivit.training.run import lock

    changes = command.changes(rest, _parser())
    if options.show:
        print(configs.page(configs.load(options.config, changes)))
        return
    if options.workdir is None:
        raise ValueError("--workdir is missing: give the directory of the run, --workdir=DIR.")
    _prepare_devices(options)
    config = configs.load(options.config, changes)
    if options.seeds is None:
        train(config, options.workdir)
        return
    runs = {f"seed_{seed}": _with_seed(config, seed) for seed in _seeds(options.seeds)}
    with lock.held(options.workdir / ".lock"):
        reports = train_all(runs, unfinished(runs, options.workdir), options.workdir)
        if reports:
            loop.write_report(options.workdir, aggregate({runs[name].seed: found for name, found in reports.items()}))
            command.say(f"{len(reports)} runs: {options.workdir / 'report.json'}")
    check_reports(runs, reports)


def _prepare_devices(options: argparse.Namespace) -> None:
    """Set what JAX reads when the first device is used: some recipes load weights when they are read."""
    from equivit.training.run import processes

    if options.deterministic:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    processes.join(options.distributed)
    run_steps_in_this_thread()


def run_steps_in_this_thread() -> None:
    """On a CPU, run steps in the calling thread; call it before the first device is used.

    It is the only thread in which glibc reuses large arrays between steps; others get new zeroed memory from the
    kernel.  Several processes keep JAX's threads, without which it would not notice the end of another process.
    """
    import jax

    if not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def train(config: ConfigDict, workdir: pathlib.Path) -> dict[str, float]:
    """Train one run and return its final figures.

    Raises as `loop.train`, and `lock.BusyError` if another process uses the directory.
    """
    from equivit.training.run import lock

    with lock.held(workdir / ".lock"), _compiled_programs_in(workdir):
        return _train(config, workdir)


@contextlib.contextmanager
def _compiled_programs_in(workdir: pathlib.Path) -> Iterator[None]:
    """Cache compiled programs in the run directory, so that a resumed run does not compile again.

    Not on a CPU, whose programs may not run on another machine, and not if the user's JAX has a cache.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    users: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if jax.default_backend() == "cpu" or users is not None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(workdir.absolute() / "compiled"))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # JAX reads the directory once


def unfinished(runs: dict[str, ConfigDict], workdir: pathlib.Path) -> dict[str, ConfigDict]:
    """The configs of the runs, by directory in `workdir`, that have no final figures yet.

    Raises ValueError if a finished run has another recipe.
    """
    from equivit.training.run import resuming

    found = {name: config for name, config in runs.items() if not resuming.is_finished(workdir / name, config)}
    for name, config in found.items():
        resuming.check_recipe(workdir / name, config)
    return found


def train_all(
    runs: dict[str, ConfigDict], waiting: dict[str, ConfigDict], workdir: pathlib.Path
) -> dict[str, dict[str, float]]:
    """Train the `unfinished` runs among `runs`; return the final figures of all runs but those that diverged."""
    from equivit import files
    from equivit.training import loop
    from equivit.training.run import resuming

    reports = {name: files.read_json(workdir / name / resuming.REPORT) for name in runs if name not in waiting}
    for number, (name, config) in enumerate(runs.items(), start=1):
        command.say(f"Run {number} of {len(runs)}: {name}{'' if name in waiting else ' is finished.'}")
        if name not in waiting:
            continue
        try:
            reports[name] = train(config, workdir / name)
        except loop.NotFiniteError as error:
            command.say(f"{name} failed: {error}")
    return {name: reports[name] for name in runs if name in reports}


def check_reports(runs: dict[str, ConfigDict], reports: dict[str, dict[str, float]]) -> None:
    """ValueError if runs have no report, because their losses were not finite."""
    if failed := [name for name in runs if name not in reports]:
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs failed: {errors.listed(failed)}; their losses rose to NaN."
        )


class Parts(NamedTuple):
    """The parts of a run, which fit together."""

    config: ConfigDict  # completed from the data
    pipeline: "TrainPipeline"
    data: "TrainedOn"
    model: "Config"
    objective: "Objective"
    module: "nnx.Module"  # the trained module, abstract
    teachers: "dict[str, ModelModule]"
    steps: int  # of the whole run


def prepare(config: ConfigDict) -> Parts:
    """Open the data of a run, build its parts and check that they fit together and suit the evaluation.

    Raises:
      FileNotFoundError: data or weights are missing.
      ValueError: names the key, the value, the rule and the nearest fix.
    """
    from equivit.data import loader
    from equivit.data.config import preparation
    from equivit.evaluation import runner
    from equivit.trained_on import TrainedOn
    from equivit.training import build, logging, loop, sharding
    from equivit.training.teachers import check_teacher_classes, load_teachers

    # ---- The data, and the model with fields from the data.
    suite = config.evaluation.suite
    runner.check(suite, config)
    pipeline = build.make_pipeline(config)
    data = TrainedOn(pipeline.classes, pipeline.num_examples, preparation(config.data))
    config = loader.complete(config, pipeline)
    model, objective = build.model_configuration(config), build.make_objective(config)

    # ---- Check the whole run: an invalid evaluation would otherwise fail after the last step.
    teachers = load_teachers(config)
    objective.check_model(model, teachers)
    check_teacher_classes(config, data)
    runner.prepare(build.exported_model(objective, model), config, suite, classes=data.classes)
    sharding.check_batch(config.batch_size, config.optimizer.accumulation, sharding.create_mesh(config.mesh))
    steps, per_epoch = loop.total_steps(config, pipeline.steps_per_epoch), pipeline.steps_per_epoch
    module = build.abstract_module(objective, model)
    build.make_optimizer(config, objective, module, total=config.schedule.length or steps, per_epoch=per_epoch)
    logging.check_traced(config.log, steps)
    return Parts(config, pipeline, data, model, objective, module, teachers, steps)


def _split(mesh: "Mesh", module: "nnx.Module") -> str:
    """A line on how `mesh.fsdp` splits the parameters: axes that it does not divide stay whole."""
    from equivit import logical
    from equivit.kernels.mesh import held_share

    shapes = {leaf: array.shape for leaf, array in logical.take(module).items()}
    share, best = held_share(shapes, mesh, logical.stack_axes(module)), mesh.shape["data"] / mesh.size
    return f"mesh.fsdp: each device holds {100 * share:.1f} % of the parameters, at best {100 * best:.1f} %."


def _train(config: ConfigDict, workdir: pathlib.Path) -> dict[str, float]:
    import jax

    from equivit.evaluation import runner, summary
    from equivit.training import build, loop, sharding
    from equivit.training.run import held_out_list
    from equivit.training.warm_start import initial_parameters

    config, pipeline, data, model, objective, module, teachers, steps = prepare(config)
    suite, mesh = config.evaluation.suite, sharding.create_mesh(config.mesh)
    command.say(
        f"Training {config.model.name} on {config.data.source} ({pipeline.num_examples} images, {pipeline.num_classes} "
        f"classes): {steps} steps of {config.batch_size} images, seed {config.seed}, in {workdir}."
    )
    if config.mesh.fsdp > 1:
        command.say(_split(mesh, module))
    if held_out := held_out_list.record(workdir, config.data):
        command.say(held_out)
    parts = dict(objective=objective, build_model=model.build, teachers=teachers)
    outcome = loop.train(
        config,
        workdir=workdir,
        pipeline=pipeline,
        evaluate=lambda model, config: runner.evaluate(model, config, suite, classes=data.classes),
        initial=lambda: initial_parameters(config, model),
        trained_on=data,
        make_program=functools.partial(build.make_program, **parts),
    )
    with jax.set_mesh(mesh):
        command.say(summary.conclude(workdir, outcome.model, outcome.results, config, step=steps))
    return outcome.report


def aggregate(reports: dict[int, dict[str, float]]) -> dict:
    """Compute mean, spread (standard deviation, n - 1) and values of each metric that all seeds have."""
    seeds = list(reports)
    result: dict[str, Any] = {"seeds": seeds}
    for name in [name for name in reports[seeds[0]] if all(name in report for report in reports.values())]:
        values = [reports[seed][name] for seed in seeds]
        spread = statistics.stdev(values) if len(values) > 1 else None
        result[name] = {"mean": statistics.fmean(values), "spread": spread, "values": values}
    return result


def _with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    one = copy.deepcopy(config).unlock()
    one.seed = seed
    return one.lock()


def _seeds(text):
    from equivit import constraints

    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds={text}: give integers separated by commas, such as --seeds=0,1,2.") from None
    for seed in seeds:
        constraints.check("--seeds", seed, constraints.Seed)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds={text}: a seed occurs twice; give each seed once.")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
