"""Train a model.

    python -m equivit.train --config=configs/quickstart.py --workdir=/tmp/run
    python -m equivit.train --config=configs/quickstart.py:quicktest --workdir=/tmp/run --config.data.workers=2

The same --workdir resumes a run.  Ctrl-C and SIGTERM save the run and exit with status 130 or 143; only a finished run
exits with 0.
"""

import argparse
import copy
import functools
import os
import pathlib
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from equivit import command

if TYPE_CHECKING:
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
    reports, seeds = {}, _seeds(options.seeds)
    with lock.held(options.workdir / ".lock"):
        for seed in seeds:
            one = copy.deepcopy(config).unlock()
            one.seed = seed
            reports[seed] = train(one.lock(), options.workdir / f"seed_{seed}")
        loop.write_report(options.workdir, aggregate(reports))
    command.say(f"{len(reports)} runs: {options.workdir / 'report.json'}")


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

    with lock.held(workdir / ".lock"):
        _keep_compiled_programs(workdir)
        return _train(config, workdir)


def _keep_compiled_programs(workdir: pathlib.Path) -> None:
    """Cache compiled programs in the run directory, so that a resumed run does not compile again.

    Not on a CPU, whose programs may not run on another machine, and not if the user's JAX has a cache.
    """
    import jax

    users: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if jax.default_backend() != "cpu" and users is None:
        jax.config.update("jax_compilation_cache_dir", str(workdir.absolute() / "compiled"))


class Parts(NamedTuple):
    """The parts of a run, which fit together."""

    config: ConfigDict  # completed from the data
    pipeline: "TrainPipeline"
    data: "TrainedOn"
    model: "Config"
    objective: "Objective"
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
    from equivit.training import build, logging, loop, schedules, sharding
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
    schedules.create(config.schedule, total_steps=config.schedule.length or steps, steps_per_epoch=per_epoch)
    logging.check_traced(config.log, steps)
    return Parts(config, pipeline, data, model, objective, teachers, steps)


def _train(config: ConfigDict, workdir: pathlib.Path) -> dict[str, float]:
    import jax

    from equivit.evaluation import runner, summary
    from equivit.training import build, loop, sharding
    from equivit.training.run import held_out_list
    from equivit.training.warm_start import initial_parameters

    config, pipeline, data, model, objective, teachers, steps = prepare(config)
    suite = config.evaluation.suite
    command.say(
        f"Training {config.model.name} on {config.data.source} ({pipeline.num_examples} images, {pipeline.num_classes} "
        f"classes): {steps} steps of {config.batch_size} images, seed {config.seed}, in {workdir}."
    )
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
    with jax.set_mesh(sharding.create_mesh(config.mesh)):
        command.say(summary.conclude(workdir, outcome.model, outcome.results, config))
    return outcome.report


def aggregate(reports: dict[int, dict[str, float]]) -> dict:
    """Compute mean, spread (standard deviation, n - 1) and values of each metric over the seeds."""
    seeds = list(reports)
    result: dict[str, Any] = {"seeds": seeds}
    for name in reports[seeds[0]]:
        values = [reports[seed][name] for seed in seeds]
        spread = statistics.stdev(values) if len(values) > 1 else None
        result[name] = {"mean": statistics.fmean(values), "spread": spread, "values": values}
    return result


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
