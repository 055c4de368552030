"""The configuration of a run: all keys with their defaults, reading a file of `configs/`, checking the values.

A file of `configs/` begins with `get_base()` and changes what it needs; the command line changes more:

    python -m equivit.train --config=configs/quickstart.py:quicktest --config.optimizer.weight_decay=0.1
    python -m equivit.train --config=quickstart:quicktest  # the same recipe, from any directory

A file may also define `complete(config)`, which fills in values that depend on those of the command line.

The module that uses a section declares it (`sections.py`), with a `check` of values that do not fit together.  The
`model` section is a name of the zoo and the arguments for it, which the zoo checks.
"""

import ast
import dataclasses
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Annotated, Any

from ml_collections import ConfigDict

from equivit import constraints, errors, sections
from equivit.constraints import OneOf, PositiveFloat, PositiveInt, Seed
from equivit.data import config as data_config
from equivit.evaluation import config as evaluation_config
from equivit.intervals import LARGEST
from equivit.models import zoo
from equivit.models.patchtst import model as patchtst
from equivit.objectives.registry import OBJECTIVES
from equivit.precision import PRECISIONS
from equivit.training import logging, optimizers, schedules, sharding

RECIPES = pathlib.Path(__file__).parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The `checkpoint` section; defined here because checkpoints.py imports this file."""

    every_steps: PositiveInt | None = None
    every_seconds: PositiveFloat | None = None  # checked after each step; with several processes, at log.every_steps
    keep: PositiveInt = 2
    teacher_every_steps: PositiveInt | None = None  # keep the teacher of DINOv2 as a saved model, in teachers/<step>/


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All keys, in the order of --show; None means "not set"."""

    seed: Seed = 0
    steps: PositiveInt | None = None  # this or epochs
    epochs: PositiveFloat | None = None
    batch_size: PositiveInt = 128
    precision: Annotated[str, OneOf(PRECISIONS)] = "float32"  # of the computation; parameters are always float32
    init: str | None = None  # a run, a saved model or pretrained weights to start from
    model: Any = None  # `name`, and options of this model
    data: data_config.DataConfig = data_config.DataConfig()
    objective: Any = None  # `name`, and the options of this objective
    optimizer: optimizers.OptimizerConfig = optimizers.OptimizerConfig()
    schedule: schedules.ScheduleConfig = schedules.ScheduleConfig()
    mesh: sharding.MeshConfig = sharding.MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: evaluation_config.EvaluationConfig = evaluation_config.EvaluationConfig()
    log: logging.LogConfig = logging.LogConfig()


@dataclasses.dataclass(frozen=True)
class Schema:
    """The keys and values that configurations of one kind may have."""

    check: Callable[[ConfigDict], None]  # raises ValueError for unknown keys and impossible values
    types: Callable[[ConfigDict], Mapping[str, Any]]  # of the keys that a configuration has or may get, by section


class Missing(str):
    """A placeholder for a value that a file of `configs/` cannot know; its text describes the value.

    The command line must set it, to a value of any type; otherwise an error shows the text.
    """


def get_base(objective: str = "supervised") -> ConfigDict:
    """Return every section with its defaults; the `objective` section has the keys of the named objective.

    Raises ValueError for an unknown objective.
    """
    errors.one_of("config.objective.name", objective, OBJECTIVES)
    options = dataclasses.asdict(OBJECTIVES[objective].Options())
    config = TrainConfig(model={"name": "vit_ti16"}, objective={"name": objective, **options})
    return ConfigDict(dataclasses.asdict(config))


def validate(config: ConfigDict) -> None:
    """Refuse unknown keys and impossible values.

    Raises ValueError with one line: the key, its value, the rule, and the nearest valid name.
    """
    if "objective" not in config and "runs" in config:
        raise ValueError(
            "config: this recipe is for time series, and lists the values of its runs; train it by python -m "
            "equivit.sweep without --sweep, and change the lists, such as --config.runs.lr=1e-3,3e-4."
        )
    check_keys(config, get_base(_name(config, "objective")))
    check_values(config)
    schedules.check_decay(config.schedule)


def _check_given(config: ConfigDict) -> None:
    for key, value in flat(config).items():
        if isinstance(value, Missing):
            raise ValueError(f"config.{key} is missing: {value}")


def check_values(config: ConfigDict) -> None:
    """As `validate`, for the configuration of a stored run: unknown keys and a rate that rises are allowed."""
    _check_given(config)
    name = config.model.get("name")
    constraints.check("config.model.name", name, str)
    if name in patchtst.NAMES:
        raise ValueError(f"config.model.name={name!r} is for time series; train it by python -m equivit.sweep.")
    zoo.check_options(name, config.model)  # the names alone: the values are checked once the data are known
    sections.check("config", config, {**_types(config), "model": Any})
    data_config.check(config.data)
    schedules.check(config.schedule)
    evaluation_config.check(config.evaluation)
    logging.check(config.log)
    _check_run(config)
    OBJECTIVES[config.objective.name].check(config)


def _types(config: ConfigDict) -> dict[str, Any]:
    objective = OBJECTIVES.get(str(_name(config, "objective")))
    options = sections.types_of(objective.Options) if objective else {}
    return {
        **sections.types_of(TrainConfig),
        "model": zoo.types_of(str(_name(config, "model"))),
        "objective": {"name": Annotated[str, OneOf(OBJECTIVES)], **options},
    }


def _name(config: ConfigDict, section: str) -> Any:
    """Return the `name` in a section, or its default if it is missing (a later check reports that)."""
    found = config.get(section)
    default = "supervised" if section == "objective" else ""
    return found.get("name", default) if isinstance(found, ConfigDict) else default


def _check_recipe(config: ConfigDict) -> None:
    """As `validate`; also ValueError if a tracker's library is missing, without which stored runs can be read."""
    validate(config)
    logging.check_libraries(config.log)


TRAINING = Schema(_check_recipe, _types)


def check_keys(config: ConfigDict, base: ConfigDict, prefix: str = "") -> None:
    """Raise ValueError unless `config` has the keys of `base` and no others; a `model` section may have any."""
    for key in config:
        if key not in base:
            known = ", ".join(base)
            raise ValueError(f"config.{prefix}{key}: no such key{errors.nearest(key, base)} (keys here: {known}).")
        if isinstance(base[key], ConfigDict):
            if not isinstance(config[key], ConfigDict):
                raise ValueError(f"config.{prefix}{key}={config[key]!r}: this is a section, not a value.")
            if prefix + key != "model":
                check_keys(config[key], base[key], f"{prefix}{key}.")
    for key in base:
        if key not in config:
            raise ValueError(f"config.{prefix}{key}: missing; begin the file with get_base().")


def _check_run(config: ConfigDict) -> None:
    """Raise ValueError for values of several sections that do not fit together."""
    if (config.steps is None) == (config.epochs is None):
        raise ValueError(f"config: {config.steps=} and {config.epochs=}; set exactly one, and the other to None.")
    if config.checkpoint.teacher_every_steps and "teacher" not in OBJECTIVES[config.objective.name].weights:
        raise ValueError(
            f"config.checkpoint.teacher_every_steps={config.checkpoint.teacher_every_steps}: "
            f"objective.name={config.objective.name!r} trains no teacher; set it to None."
        )
    if config.batch_size % (parts := config.optimizer.accumulation):
        raise ValueError(
            f"config.batch_size={config.batch_size} must be divisible by optimizer.accumulation={parts}; "
            f"{errors.multiples(config.batch_size, parts)}."
        )


def load(path: str, overrides: Iterable[str] = (), *, schema: Schema = TRAINING) -> ConfigDict:
    """Return the checked configuration of a recipe or a file, changed by overrides such as `data.workers=2`.

    Args:
      path: the name of a recipe of `equivit.configs`, or a Python file; a mode may follow: "octic_h:H8",
        "my/recipe.py:H8".  A file may import modules beside it.
      overrides: `key=value`, in order.
      schema: for commands whose configurations have other sections.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: names the key, the value, the rule and the nearest fix.
    """
    file, _, mode = path.partition(":")
    module = _module(file)
    try:
        config = module.get_config(mode) if mode else module.get_config()
    except (TypeError, AttributeError) as error:  # raised by ConfigDict: a value of another type, a missing key
        raise ValueError(f"config {file}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise _no_config(file)
    with config.unlocked():
        for text in overrides:
            override(config, text, schema)
        if hasattr(module, "complete"):
            _check_given(config)
            module.complete(config)
    schema.check(config)
    return config.lock()


def _module(file: str) -> ModuleType:
    """Import a recipe, given by its name, or a Python file that defines `get_config`."""
    path = pathlib.Path(file)
    recipes = sorted({path.stem for path in RECIPES.glob("*.py")} - {"__init__", "recipes"})
    if file == path.stem:
        errors.one_of("--config", file, recipes)
        path = RECIPES / f"{file}.py"
    elif not path.is_file():
        found = errors.nearest(file, path.parent.glob("*.py"))
        if path.stem in recipes:
            found = f"; the recipe that comes with equivit is {path.stem}"
        raise FileNotFoundError(f"config: there is no file '{file}'{found}.")
    ours = path.stem in recipes and path.parent.samefile(RECIPES)
    module = importlib.import_module(f"equivit.configs.{path.stem}") if ours else _import_file(path)
    if not hasattr(module, "get_config"):
        raise _no_config(file)
    return module


def _no_config(file: str) -> ValueError:
    return ValueError(f"config: '{file}' must define get_config(mode), which returns the configuration.")


def _import_file(path: pathlib.Path) -> ModuleType:
    """Import a file; modules beside it are found first, now and later, as they are for a script."""
    spec = importlib.util.spec_from_file_location("equivit_config", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"config: '{path}' must be a Python file, with the ending .py.")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def override(config: ConfigDict, text: str, schema: Schema = TRAINING) -> None:
    """Change one key, from text such as "data.workers=2".

    The value may still be invalid; `schema.check` rejects it later.  `ml_collections.config_flags` is not used: it
    rejects keys whose default is None, cannot set None, and does not support unions of types.

    Raises:
      ValueError: an unknown key, with the nearest; a section, or no value.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--config.{key}: give a value, --config.{key}=VALUE.")
    *names, last = key.split(".")
    section, types = config, schema.types(config)
    for name in names:
        _check_known(key, name, section)
        section, types = section[name], types.get(name, {})
        if not isinstance(section, ConfigDict):
            raise ValueError(f"--config.{key}: '{name}' is a value, not a section.")
    if names != ["model"]:  # which may get new keys
        _check_known(key, last, section)
    if isinstance(old := section.get(last), ConfigDict):
        raise ValueError(f"--config.{key}: this is a section; set one of {', '.join(old)} in it.")
    value = parse(value, types.get(last, Any))
    if isinstance(old, tuple) and isinstance(value, str):
        value = tuple(value.split(","))  # the check then names the wrong word
    if isinstance(old, float) and type(value) is int and abs(value) <= LARGEST:
        value = float(value)
    section[last] = None  # clears the type: a file's epochs=90 can become 0.5
    section[last] = value


def _check_known(key: str, name: str, section: ConfigDict) -> None:
    if name not in section:
        near, known = errors.nearest(name, section), ", ".join(section)
        raise ValueError(f"--config.{key}: no key '{name}'{near} (keys here: {known}).")


def parse(text: str, type_: Any) -> Any:
    """Parse a text as None, True, False, a number, a tuple, comma-separated words, or text.

    The first reading that the type allows counts: "none" is a word if the type has that word but not None, as in
    `model.remat`.  If the type allows none of them, the literal is returned for the check to reject.
    """
    literal = _literal(text)
    readings = [literal]
    if literal is text:
        words = tuple(text.split(","))
        mixed = tuple(int(word) if word.isdecimal() and len(word) < 10 else word for word in words)  # such as "full,6"
        readings = [text, words, mixed]
    elif literal is None or type_ is str:  # for other types 5 is a number, even if they allow file names
        readings = [literal, text]
    return next((reading for reading in readings if constraints.allows(reading, type_)), literal)


def _literal(text: str) -> Any:
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # all errors of literal_eval
        return text
    return tuple(value) if isinstance(value, list) else value


def from_json(path: pathlib.Path) -> ConfigDict:
    """Read the configuration that a run wrote into its directory; ValueError if the file is damaged.

    Keys unknown to this version stay in the result, and nothing reads them.  Where a section is passed on as a whole
    (`model`, `evaluation.sar`, `evaluation.segmentation`), they are an error.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        config = get_base(stored["objective"]["name"])
        config.model = dict(stored.pop("model"))
        _update(config, stored)
        check_values(config)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the configuration of a run ({errors.reason(error)}); it is damaged, or of another "
            "version.  Move it away: training in this directory writes it again."
        ) from error
    return config.lock()


def _update(config: ConfigDict, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and key in config:
            _update(config[key], value)
        else:
            config[key] = tuple(value) if isinstance(value, list) else value


def to_json(config: ConfigDict) -> str:
    """Return the configuration as text that `from_json` reads."""
    return json.dumps(plain(config), indent=2) + "\n"


def plain(config: ConfigDict) -> dict[str, Any]:
    """Return the configuration as JSON values: tuples become lists."""
    return json.loads(config.to_json())


def flat(tree: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Return the values by dotted key, such as "optimizer.weight_decay"."""
    values = {}
    for key, value in tree.items():
        if isinstance(value, dict | ConfigDict):
            values.update({f"{key}.{below}": entry for below, entry in flat(value).items()})
        else:
            values[key] = value
    return values


def differences(a: ConfigDict, b: ConfigDict) -> list[str]:
    """Return the keys in which two configurations differ, such as "optimizer.weight_decay"."""
    one, other = flat(plain(a)), flat(plain(b))
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def page(config: ConfigDict) -> str:
    """List every key with its value, section by section; values that differ from the default are marked.

    A line `key = value` corresponds to the argument --config.key=value.
    """
    defaults, values = flat(get_base(config.objective.name)), flat(config)
    place = {key: i for i, key in enumerate(defaults)}
    lines, before = [], ""
    for key in sorted(values, key=lambda key: place.get(key, place["model.name"] + 0.5)):
        section = key.partition(".")[0] if "." in key else ""
        lines += [""] if section != before else []
        is_default = key not in defaults or values[key] == defaults[key]
        line = f"{key} = {values[key]!r}"
        lines.append(line if is_default else f"{line:<50}  # default: {defaults[key]!r}")
        before = section
    return "\n".join(lines)
