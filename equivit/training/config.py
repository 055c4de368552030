"""The configuration of a run: all keys with their defaults, reading a file of `configs/`, and checking the values.

A file of `configs/` begins with `get_base()` and changes what it needs; the command line changes more:

    python -m equivit.train --config=configs/quickstart.py:quicktest --config.optimizer.weight_decay=0.1

A section is owned by the module that uses it, which holds its DEFAULTS, their TYPES and its `check`.  The `model`
section is a name of the zoo and the arguments given to it; the zoo checks those.
"""

import ast
import dataclasses
import functools
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from ml_collections import ConfigDict

from equivit import constraints, errors
from equivit.constraints import OneOf, PositiveFloat, PositiveInt, Seed
from equivit.data import config as data
from equivit.evaluation import config as evaluation
from equivit.models import zoo
from equivit.models.patchtst import model as patchtst
from equivit.objectives.objective import Objective
from equivit.objectives.registry import OBJECTIVES
from equivit.precision import PRECISIONS
from equivit.training import logging, optimizers, schedules, sharding

OWNERS = {
    "data": data,
    "optimizer": optimizers,
    "schedule": schedules,
    "mesh": sharding,
    "evaluation": evaluation,
    "log": logging,
}
TYPES: dict[str, Any] = dict(  # of the keys outside of sections, and of `checkpoint`
    seed=Seed,
    steps=PositiveInt | None,
    epochs=PositiveFloat | None,
    batch_size=PositiveInt,
    precision=Annotated[str, OneOf(PRECISIONS)],
    init=str | None,
    checkpoint=dict(
        every_steps=PositiveInt | None,
        every_seconds=PositiveFloat | None,
        keep=PositiveInt,
        teacher_every_steps=PositiveInt | None,
    ),
)


@dataclasses.dataclass(frozen=True)
class Schema:
    """The keys and values that configurations of one kind may have.

    Attributes:
      check: raises ValueError for unknown keys and impossible values.
      types: the types of the keys that a configuration has or may get, by section.
    """

    check: Callable[[ConfigDict], None]
    types: Callable[[ConfigDict], Mapping[str, Any]]


class Missing(str):
    """In place of a value that a file of `configs/` cannot know: what to give, and how to find it.

    The command line gives the value, of any type; without it the configuration is refused with this text.
    """


def get_base(objective: str = "supervised") -> ConfigDict:
    """Every section with its defaults; None means "not set".

    The keys of the `objective` section are those of the objective named.  Raises ValueError for an unknown one.
    """
    return ConfigDict(_defaults(objective))


def _defaults(objective: str) -> dict[str, Any]:
    """The keys in the order in which they are shown."""
    errors.one_of("config.objective.name", objective, OBJECTIVES)
    return dict(
        seed=0,
        steps=None,  # this or epochs
        epochs=None,
        batch_size=128,
        precision="float32",  # of the computation (precision.py); parameters are always float32
        init=None,  # a run, a saved model or pretrained weights to start from
        model=dict(name="vit_ti16"),
        data=data.DEFAULTS,
        objective=dict(name=objective, **OBJECTIVES[objective].DEFAULTS),
        optimizer=optimizers.DEFAULTS,
        schedule=schedules.DEFAULTS,
        mesh=sharding.DEFAULTS,
        # Here, because checkpoints.py imports this file.  `teacher_every_steps` keeps the teacher of DINOv2 as a saved
        # model, in teachers/<step>/.
        checkpoint=dict(every_steps=None, every_seconds=None, keep=2, teacher_every_steps=None),
        evaluation=evaluation.DEFAULTS,
        log=logging.DEFAULTS,
    )


def validate(config: ConfigDict) -> None:
    """Refuse unknown keys and impossible values.

    Raises ValueError with one line: the key, its value, the rule, and the nearest valid name.
    """
    check_keys(config, get_base(_name(config, "objective")))
    _check_values(config)


def _check_values(config: ConfigDict) -> None:
    for key, value in flat(config).items():
        if isinstance(value, Missing):
            raise ValueError(f"config.{key} is missing: {value}")
    _check_model(config.model)
    for section, owner in OWNERS.items():
        owner.check(config[section])
    _check_run(config)
    objective = OBJECTIVES[_name(config, "objective")]
    constraints.check_section("config.objective", config.objective, objective.TYPES)
    objective.check(config)


def _types(config: ConfigDict) -> dict[str, Any]:
    sections = {section: owner.TYPES for section, owner in OWNERS.items()}
    objective = OBJECTIVES.get(str(_name(config, "objective")), Objective).TYPES
    return dict(TYPES, **sections, objective=objective, model=zoo.types_of(str(_name(config, "model"))))


def _name(config: ConfigDict, section: str) -> Any:
    """The `name` in a section; the default where a file of `configs/` has left it out, which is refused later."""
    found = config.get(section)
    default = "supervised" if section == "objective" else ""
    return found.get("name", default) if isinstance(found, ConfigDict) else default


TRAINING = Schema(validate, _types)


def _check_model(section: ConfigDict) -> None:
    """The name and the names of its options; the values are checked when the data have decided the others."""
    name = section.get("name")
    constraints.check("config.model.name", name, str)
    if name in patchtst.NAMES:
        raise ValueError(f"config.model.name={name!r} is for time series; train it by python -m equivit.sweep.")
    zoo.check_options(name, section)


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
    """The keys outside of sections, and `checkpoint`."""
    constraints.check_section("config", config, TYPES)
    if (config.steps is None) == (config.epochs is None):
        raise ValueError(f"config: {config.steps=} and {config.epochs=}; set exactly one, and the other to None.")
    if config.checkpoint.teacher_every_steps and "teacher" not in OBJECTIVES[config.objective.name].weights:
        raise ValueError(
            f"config.checkpoint.teacher_every_steps={config.checkpoint.teacher_every_steps}: "
            f"objective.name={config.objective.name!r} has no teacher of its own; set it to None."
        )
    if config.batch_size % (parts := config.optimizer.accumulation):
        raise ValueError(
            f"config.batch_size={config.batch_size} must be divisible by optimizer.accumulation={parts}; "
            f"{errors.multiples(config.batch_size, parts)}."
        )


def load(path: str, overrides: Iterable[str] = (), *, schema: Schema = TRAINING) -> ConfigDict:
    """The checked configuration of `file.py` or `file.py:mode`, changed by overrides such as `data.workers=2`.

    `schema` is for commands whose configurations have other sections.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: names the key, the value, the rule and the nearest fix.
    """
    file, _, mode = path.partition(":")
    get_config = _get_config(file)
    try:
        config = get_config(mode) if mode else get_config()
    except (TypeError, AttributeError) as error:  # raised by ConfigDict: a value of another type, a missing key
        raise ValueError(f"config {file}: {error}") from error
    with config.unlocked():
        for text in overrides:
            override(config, text, schema)
    schema.check(config)
    return config.lock()


def _get_config(file: str) -> Callable[..., ConfigDict]:
    """The function of that name in a Python file."""
    if not pathlib.Path(file).is_file():
        found = errors.nearest(file, pathlib.Path(file).parent.glob("*.py"))
        raise FileNotFoundError(f"config: there is no file '{file}'{found}.")
    spec = importlib.util.spec_from_file_location("equivit_config", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"config: '{file}' must be a Python file, with the ending .py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config


def override(config: ConfigDict, text: str, schema: Schema = TRAINING) -> None:
    """Change one key, from text such as "data.workers=2".  Raises ValueError for an unknown key or a wrong type."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--config.{key}: give a value, --config.{key}=VALUE.")
    *names, last = key.split(".")
    section = config
    for name in names:
        _check_known(key, name, section)
        section = section[name]
        if not isinstance(section, ConfigDict):
            raise ValueError(f"--config.{key}: '{name}' is a value, not a section.")
    if names != ["model"]:  # which may get new keys
        _check_known(key, last, section)
    old, free = section.get(last), names == ["model"] or isinstance(section.get(last), Missing)
    old = None if isinstance(old, Missing) else old
    if isinstance(old, ConfigDict):
        raise ValueError(f"--config.{key}: this is a section; set one of {', '.join(old)} in it.")
    type_ = functools.reduce(lambda types, name: types.get(name, {}), names, schema.types(config)).get(last, Any)
    value = parse(value, type_) if old is None else _parse_like(value, old, type_)
    try:
        if isinstance(value, bool) and isinstance(old, float):  # True would become 1.0
            raise TypeError
        # The zoo knows the types of a model: a patch may be a number or a pair.  And a config with a whole
        # number, such as epochs=90, leaves the key free for 0.5.
        fraction = isinstance(old, int) and isinstance(value, float) and type_ is not Any
        if free or (fraction and constraints.allows(value, type_)):
            with section.ignore_type():
                section[last] = value
        else:
            section[last] = value
    except (TypeError, OverflowError):  # the latter for a whole number that no float holds
        raise ValueError(f"--config.{key}={_shown(value)}: {_wanted(key, value, old, type_)}.") from None


def _check_known(key: str, name: str, section: ConfigDict) -> None:
    if name not in section:
        near, known = errors.nearest(name, section), ", ".join(section)
        raise ValueError(f"--config.{key}: no key '{name}'{near} (keys here: {known}).")


def _parse_like(text: str, old: Any, type_: Any) -> Any:
    """The value that a text stands for in the place of `old`."""
    if isinstance(old, str) and text.lower() != "none":
        return text
    value = parse(text, type_)
    is_words = isinstance(old, tuple) and all(isinstance(entry, str) for entry in old)
    return _listed(value, type_) if is_words and isinstance(value, str) else value


def parse(text: str, type_: Any) -> Any:
    """The value that a text stands for: None, True, False, a number, a tuple, ...; else the text itself.

    "none" is a word where `type_` has that word and not None, such as `model.remat=none`.  Words with commas between
    are a tuple where `type_` has it and not the text, such as `model.adaptive=token,merge`.
    """
    if text.lower() == "none" and constraints.allows(text, type_) and not constraints.allows(None, type_):
        return text
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # all that it raises
        entries = _listed(text, type_)
        return entries if constraints.allows(entries, type_) and not constraints.allows(text, type_) else text


def _listed(text: str, type_: Any) -> tuple[str | int, ...]:
    """Words with commas between; among them numbers, if the type has these and not the words, as in "full,6"."""
    words = tuple(text.split(","))
    entries = tuple(int(word) if word.isdecimal() and len(word) < 10 else word for word in words)
    return entries if constraints.allows(entries, type_) and not constraints.allows(words, type_) else words


def _shown(value: Any) -> str:
    """As it is written on the command line."""
    return errors.shown(value).strip("'")


def _wanted(key: str, value: Any, old: Any, type_: Any) -> str:
    """A description of valid values, for an error about one of another type."""
    if isinstance(old, tuple) and not all(map(errors.is_number, old)) and constraints.allows((value,), type_):
        old = (value,)  # such as ranges, which may be words or numbers
    if isinstance(old, tuple) and errors.is_number(value) and all(map(errors.is_number, old)):
        like = repr((value,) * len(old)).replace(" ", "")
        count = "a tuple" if len(old) == 1 else f"{len(old)} values, not one"
        return f'this takes {count}; write --config.{key}="{like}"'
    return f"not of the type {type(old).__name__} of its default {old!r}"


def from_json(path: pathlib.Path) -> ConfigDict:
    """The configuration that a run wrote into its directory; ValueError if the file is damaged.

    Keys that this version does not have stay, and have no effect.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        config = get_base(stored["objective"]["name"])
        config.model = dict(stored.pop("model"))
        _update(config, stored)
        _check_values(config)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the configuration of a run ({errors.reason(error)}); it is damaged, or of another "
            "version.  Move it away: training in this directory writes it again."
        ) from error
    return config.lock()


def _update(config: ConfigDict, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _update(config[key], value)
        else:
            config[key] = tuple(value) if isinstance(value, list) else value


def to_json(config: ConfigDict) -> str:
    """The configuration as text that `from_json` reads."""
    return json.dumps(plain(config), indent=2) + "\n"


def plain(config: ConfigDict) -> dict[str, Any]:
    """The configuration as JSON has it: tuples are lists."""
    return json.loads(config.to_json())


def flat(tree: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """The values by dotted key, such as "optimizer.weight_decay"."""
    values = {}
    for key, value in tree.items():
        if isinstance(value, dict | ConfigDict):
            values.update({f"{key}.{below}": entry for below, entry in flat(value).items()})
        else:
            values[key] = value
    return values


def differences(a: ConfigDict, b: ConfigDict) -> list[str]:
    """The keys in which two configurations differ, such as "optimizer.weight_decay"."""
    one, other = flat(plain(a)), flat(plain(b))
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def page(config: ConfigDict) -> str:
    """Every key and its value on a line, section by section; what is not a default is marked.

    A line `key = value` can be given as --config.key=value.
    """
    defaults, values = flat(_defaults(config.objective.name)), flat(config)
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
