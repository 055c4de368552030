"""Resume a run: check values that must not change, report changes, and record both.

config.json holds the configuration; run.json holds the training data and the conditions for bit-exact results.
"""

import json
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from equivit import errors, files, trained_on
from equivit.models import zoo
from equivit.objectives.registry import OBJECTIVES
from equivit.trained_on import TrainedOn
from equivit.training import config as configs
from equivit.training.run import checkpoint_files

REPORT = "report.json"  # the final figures, once the run has ended
EXECUTION = ("remat", "unroll")  # fields of a model that change how its blocks run, but not their results
# Keys and key prefixes without effect on any figure, and those without effect on the trained state.
SILENT = ("data.workers", "log.", "checkpoint.")
HARMLESS = (*SILENT, "data.eval_", "data.corruption", "data.severity", "evaluation.")
OF_DATA = ("image_size", "num_classes", "in_channels")  # fields of a model that `loader.complete` adds


def config_before(workdir: pathlib.Path) -> ConfigDict | None:
    """The configuration at the last start of the run; None without config.json."""
    path = workdir / "config.json"
    return configs.from_json(path) if path.is_file() else None


def data_before(workdir: pathlib.Path) -> TrainedOn:
    """The training data of the run; unknown without run.json."""
    found = _conditions_before(workdir)
    try:
        return trained_on.from_json(found)
    except ValueError as error:
        raise ValueError(f"{workdir / 'run.json'} is damaged ({error}); remove it to create it again.") from error


def check_classes(workdir: pathlib.Path, config: ConfigDict, data: TrainedOn) -> None:
    """ValueError if the class names of the data changed since the start of the run."""
    thing, before = f"config.data.source={errors.shown(config.data.source)}", data_before(workdir).classes
    fix = "give the data that the run began with, or another --workdir"
    trained_on.check_classes(thing, data.classes, before, workdir / "run.json", fix)


def conditions(mesh: Mesh, data: TrainedOn, teachers: Mapping[str, Any]) -> dict[str, Any]:
    """The values of run.json: the data, and all other conditions for bit-exact results besides the configuration.

    Args:
      teachers: their arrays, by name; a teacher changes if it is a run that has trained further.
    """
    device, processes = mesh.devices.flat[0], jax.process_count()
    kind = f"{_processor()}, {_threads()} threads" if device.platform == "cpu" else device.device_kind
    devices = f"{mesh.size} of {device.platform} ({kind})" + (f" in {processes} processes" if processes > 1 else "")
    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    facts = data._replace(images={}).to_json()  # config.json has them
    sums = {name: f"checksum {checkpoint_files.checksum(arrays):08x}" for name, arrays in teachers.items()}
    return {**facts, "devices": devices, "jax": jax.__version__, "XLA_FLAGS": flags, **sums}


def remarks(
    workdir: pathlib.Path, config: ConfigDict, before: ConfigDict | None, now: dict[str, Any], *, start: int
) -> list[str]:
    """Report changes since the last start, and whether the result will equal an uninterrupted run.

    Args:
      before: the configuration of the last start; None if unknown.
      now: `conditions`.
      start: the first step; 0 for a fresh run.
    """
    exact = jax.default_backend() != "gpu" or "--xla_gpu_deterministic_ops=true" in now["XLA_FLAGS"].split()
    how = "bit for bit" if exact else "within rounding (--deterministic: bit for bit)"
    if config.data.resume == "new_order":
        return ["A resumed run has a new order of the images.", *_differences(workdir, config, before, now)[0]]
    if not start:
        return [f"A resumed run equals an uninterrupted one {how}, given the same values, data and devices."]
    lines, decisive = _differences(workdir, config, before, now)
    if decisive:
        return [*lines, f"The result will differ from an uninterrupted run, by {errors.listed(decisive)}."]
    if before is None or not _conditions_before(workdir):
        return [*lines, "It is not known whether data and devices are unchanged."]
    return [*lines, f"The run continues as if it had not stopped, {how}."]


def _differences(workdir, config, before, now) -> tuple[list[str], list[str]]:
    """Lines about changed values, and the names of the values that change the result."""
    keys, past = configs.differences(before, config) if before else [], _conditions_before(workdir)
    old, new = (configs.flat(configs.plain(one)) if one else {} for one in (before, config))
    lines = [f"Changed values: {', '.join(keys)}."] if keys else []
    for key in keys:
        was, is_now = (errors.shown(values[key]) if key in values else "its default" for values in (old, new))
        lines.append(f"  config.{key}: {was} -> {is_now}")
    others = [name for name in now if name in past and name != "classes" and past[name] != now[name]]
    lines += [f"  {name}: {errors.shown(past[name])} -> {errors.shown(now[name])}" for name in others]
    return lines, [f"config.{key}" for key in keys if not key.startswith(HARMLESS)] + others


def record(
    workdir: pathlib.Path, config: ConfigDict, before: ConfigDict | None, now: dict[str, Any], *, ended: bool
) -> None:
    """Write config.json and run.json; a different earlier config is kept as config.1.json, config.2.json, ...

    Removes report.json, if any, unless the run has `ended` with this config: its figures are of the earlier one.
    """
    if jax.process_index() != 0:
        return
    changed = before is not None and configs.differences(before, config)
    if changed or not ended:
        (workdir / REPORT).unlink(missing_ok=True)
    if changed:
        files.write_bytes(files.numbered(workdir / "config.json"), (workdir / "config.json").read_bytes())
    files.write_text(workdir / "run.json", json.dumps(now, indent=1) + "\n")
    files.write_text(workdir / "config.json", configs.to_json(config))


def _conditions_before(workdir):
    path = workdir / "run.json"
    return files.read_json(path) if path.is_file() else {}


def _processor() -> str:
    """The name of the processor; its vector units determine the order of sums."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check(workdir: pathlib.Path, config: ConfigDict, before: ConfigDict | None) -> None:
    """ValueError if the model, its objective or the frozen parameters changed, even if all arrays would fit.

    Also for a change to precision "float16", as checkpoints of others hold no loss scale.
    """
    if before is None:
        return
    if config.precision == "float16" != before.precision:
        raise ValueError(
            f"config.precision='float16': the run in {workdir} has {before.precision!r}, and no loss scale; give that "
            f"value, or another --workdir with --config.init={workdir}."
        )
    fixed = ["objective.name", "optimizer.freeze"]
    fixed += [f"objective.{key}" for key in OBJECTIVES[config.objective.name].FIXED]
    if not _same_model(config.model, before.model):
        fixed += [key for key in configs.differences(before, config) if key.startswith("model.")]
    old, new = configs.flat(configs.plain(before)), configs.flat(configs.plain(config))
    for key in fixed:
        if new.get(key) != old.get(key) and key.removeprefix("model.") not in EXECUTION:
            value, has = (repr(values[key]) if key in values else "its default" for values in (new, old))
            thing = "this setting" if key in ("objective.name", "optimizer.freeze") else "the model"
            raise ValueError(
                f"config.{key}={value}: the run in {workdir} has {has}, and {thing} must not change; give that value, "
                "or another --workdir."
            )


def is_finished(workdir: pathlib.Path, config: ConfigDict) -> bool:
    """Whether a directory has the report of a finished run with the figures of this config.

    Of the model, the config may lack what the data determine.
    """
    before = config_before(workdir) if (workdir / REPORT).is_file() else None
    return before is not None and all(key.startswith(SILENT) for key in _changes(config, before))


def check_recipe(workdir: pathlib.Path, config: ConfigDict) -> None:
    """ValueError if a finished run in a directory has another recipe; training would keep its parameters.

    Such a run may be evaluated in another way, or train for longer.
    """
    before = config_before(workdir) if (workdir / REPORT).is_file() else None
    for key, (was, now) in (_changes(config, before) if before is not None else {}).items():
        longer = key in ("steps", "epochs") and errors.is_number(was) and errors.is_number(now) and now > was
        if not longer and not key.startswith(HARMLESS):
            raise ValueError(
                f"{workdir} has another recipe, config.{errors.word(key)}={errors.shown(was)} instead of "
                f"{errors.shown(now)}; give another --workdir."
            )


def _changes(config: ConfigDict, before: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """The keys in which a config, which may lack what the data determine, differs from a run's: old and new values."""
    model = {**{key: before.model[key] for key in OF_DATA if key in before.model}, **config.model}
    old, new = (configs.flat(configs.plain(one)) for one in (before, ConfigDict({**config, "model": model})))
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    try:
        same = _same_model(model, before.model)
    except ValueError:  # its options need other sizes
        same = False
    # A key of the run alone has no effect in this version, unless it is an option of the model.
    return {key: (old.get(key), new.get(key)) for key in keys if (not same if key.startswith("model.") else key in new)}


def _same_model(section: Mapping[str, Any] | ConfigDict, before: ConfigDict) -> bool:
    """Whether two `model` sections describe the same model: defaults are optional, sizes are numbers or pairs."""
    sections = [{k: v for k, v in model.items() if k not in EXECUTION} for model in (section, before)]
    return sections[0] == sections[1] or zoo.configuration(**sections[0]) == zoo.configuration(**sections[1])


def check_length(config: ConfigDict, start: int, total: int) -> None:
    """ValueError if a run would end before the step at which it resumes."""
    if start > total:
        key = "steps" if config.steps is not None else "epochs"
        raise ValueError(
            f"config.{key}={config[key]!r}: the run ends after step {total}, and the checkpoint is of step {start}; "
            f"give at least {start} steps, or another --workdir."
        )
