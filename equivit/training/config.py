"""The configuration of a run: every key with its default, reading it from a file, and checking it.

A file of `configs/` begins with `get_base()` and changes what it needs; the command line changes more:

    python -m equivit.train --config=configs/quickstart.py:quicktest --config.optimizer.weight_decay=0.1

The `model` section is a name of the zoo and the arguments given to it; the zoo knows which it takes, all other
sections take the keys below and no others.
"""

import ast
import difflib
import importlib.util
import json
import pathlib
from collections.abc import Iterable

from ml_collections import ConfigDict

LOSSES = ("bce", "cross_entropy")
CROPS = ("random_resized", "simple_random", "none", "pad")
OPTIMIZERS = ("lamb", "adamw", "sgd")
SCHEDULES = ("cosine", "constant")
WHOLE = ("steps", "data.channels", "data.train_examples", "data.eval_examples", "schedule.warmup_steps")
SOURCES = ("digits", "synthetic", "tfds:<name>", "folder:<dir>", "npz:<file>")


def get_base() -> ConfigDict:
    """Every section with its defaults; values of None are "not set"."""
    config = ConfigDict(dict(seed=0, steps=None, epochs=None, batch_size=128, init=None))  # init: a run or saved model
    config.model = dict(name="vit_ti16")
    config.data = dict(
        source="digits",
        split="train",
        eval_split="test",
        image_size=(32, 32),  # height, width
        channels=None,  # None: as the source has them
        train_examples=None,  # None: all
        eval_examples=None,
        workers=0,  # processes that decode and augment
        repeats=1,  # copies of an example in one batch (repeated augmentation)
        crop_ratio=1.0,  # evaluation: share of the resized side that the centre crop keeps
        mean=(0.485, 0.456, 0.406),  # per channel, of values in 0..1
        std=(0.229, 0.224, 0.225),
    )
    config.data.augment = dict(
        crop="random_resized",
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        flip=0.5,
        three_augment=False,
        rand_augment=None,  # such as "rand-m9-mstd0.5-inc1"
        color_jitter=0.0,
        erase=0.0,
    )
    config.objective = dict(
        name="supervised",
        loss="bce",
        mixup=0.0,  # alpha of the Beta distribution; 0: never
        cutmix=0.0,
        mix_probability=1.0,
        switch_probability=0.5,  # of cutmix where both are on
        label_smoothing=0.0,
        ema=None,  # decay of the averaged weights
    )
    config.optimizer = dict(
        name="lamb",
        weight_decay=0.02,
        betas=(0.9, 0.999),
        eps=1e-8,
        clip=1.0,  # largest global norm of the gradients; None: any
        momentum=0.9,  # sgd only
        accumulation=1,  # micro-batches per step
        no_decay=(),  # patterns of logical names, such as "head.*", beside the objective's own rules
    )
    config.schedule = dict(
        name="cosine", lr=1e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=None, warmup_steps=None, per_epoch=False
    )
    config.mesh = dict(data=-1, fsdp=1)  # -1: the devices that are left
    config.checkpoint = dict(every_steps=None, every_seconds=None, keep=2)
    config.evaluation = dict(every_epochs=None, suite=("accuracy",))
    config.log = dict(every_steps=50, tensorboard=True)
    return config


def load(path: str, overrides: Iterable[str] = ()) -> ConfigDict:
    """The checked configuration of `file.py` or `file.py:mode`, changed by overrides such as `data.workers=2`.

    Raises ValueError naming the key, the value, the rule and the nearest fix.
    """
    file, _, mode = path.partition(":")
    if not pathlib.Path(file).is_file():
        found = nearest(file, [str(p) for p in pathlib.Path(file).parent.glob("*.py")])
        raise FileNotFoundError(f"config: there is no file '{file}'{found}.")
    spec = importlib.util.spec_from_file_location("equivit_config", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        config = module.get_config(mode) if mode else module.get_config()
    except (TypeError, AttributeError) as error:  # of ConfigDict: a value of another type, a missing key
        raise ValueError(f"config {file}: {error}") from error
    with config.unlocked():
        for text in overrides:
            override(config, text)
    validate(config)
    return config.lock()


def from_json(path: pathlib.Path) -> ConfigDict:
    """The configuration that a run wrote into its directory."""
    config, stored = get_base(), json.loads(path.read_text())
    config.model = stored.pop("model")
    _update(config, stored)
    return config.lock()


def to_json(config: ConfigDict) -> str:
    """The configuration as text that `from_json` reads."""
    return json.dumps(json.loads(config.to_json()), indent=2) + "\n"


def differences(a: ConfigDict, b: ConfigDict) -> list[str]:
    """The keys in which two configurations differ, such as "optimizer.weight_decay"."""
    a, b = (_flat(json.loads(c.to_json())) for c in (a, b))
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def validate(config: ConfigDict) -> None:
    """Refuse unknown keys and impossible values.

    Raises ValueError with one line: the key, its value, the rule, and the nearest valid name.
    """
    _check_keys(config, get_base(), "")
    _one_of("objective.loss", config.objective.loss, LOSSES)
    _one_of("data.augment.crop", config.data.augment.crop, CROPS)
    _one_of("optimizer.name", config.optimizer.name, OPTIMIZERS)
    _one_of("schedule.name", config.schedule.name, SCHEDULES)
    source = config.data.source.partition(":")[0]
    if source not in {known.partition(":")[0] for known in SOURCES}:
        _one_of("data.source", config.data.source, SOURCES)
    _check_numbers(config)
    _check_combinations(config)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" without the question mark, or nothing where no known name is near."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is '{match[0]}'" if match else ""


def _check_keys(config, base, prefix):
    for key in config:
        if key not in base:
            known = ", ".join(base)
            raise ValueError(f"config.{prefix}{key}: no such key{nearest(key, base)} (keys here: {known}).")
        if isinstance(base[key], ConfigDict):
            if not isinstance(config[key], ConfigDict):
                raise ValueError(f"config.{prefix}{key}={config[key]!r}: this is a section, not a value.")
            if prefix + key != "model":
                _check_keys(config[key], base[key], f"{prefix}{key}.")
    for key in base:
        if key not in config:
            raise ValueError(f"config.{prefix}{key}: missing; begin the file with equivit.training.config.get_base().")


def _check_numbers(config):
    probability, positive, zero_or_more = "in [0, 1]", "positive", "zero or more"
    rules = {
        probability: ("objective.mix_probability", "objective.switch_probability", "data.augment.flip",
                      "data.augment.erase"),
        positive: ("batch_size", "steps", "epochs", "data.train_examples", "data.eval_examples", "data.repeats",
                   "data.channels", "data.crop_ratio", "optimizer.eps", "optimizer.clip", "optimizer.accumulation",
                   "schedule.lr", "mesh.fsdp", "checkpoint.every_steps", "checkpoint.every_seconds",
                   "checkpoint.keep", "evaluation.every_epochs", "log.every_steps"),
        zero_or_more: ("seed", "data.workers", "data.augment.color_jitter", "objective.mixup", "objective.cutmix",
                       "optimizer.weight_decay", "schedule.warmup_lr", "schedule.min_lr", "schedule.warmup_epochs",
                       "schedule.warmup_steps"),
    }  # fmt: skip
    holds = {probability: lambda v: 0 <= v <= 1, positive: lambda v: v > 0, zero_or_more: lambda v: v >= 0}
    base = _flat(get_base())
    for rule, keys in rules.items():
        for key in keys:
            value = _get(config, key)
            if value is None and (base[key] is None or key == "optimizer.clip"):
                continue
            if not _number(value) or not holds[rule](value):
                raise ValueError(f"config.{key}={value!r} must be {rule}.")
    for key in WHOLE:
        if isinstance(value := _get(config, key), float):
            raise ValueError(f"config.{key}={value!r} must be a whole number.")
    if config.mesh.data != -1 and not (_number(config.mesh.data) and config.mesh.data > 0):
        raise ValueError(f"config.mesh.data={config.mesh.data!r} must be positive, or -1 for the devices left.")
    ranges = {
        "optimizer.betas": ("in [0, 1)", lambda v: 0 <= v < 1),
        "data.augment.scale": ("in (0, 1]", lambda v: 0 < v <= 1),
        "data.augment.ratio": ("positive", lambda v: v > 0),
    }
    for key, (rule, holds) in ranges.items():
        pair = _get(config, key)
        if len(pair) != 2 or not all(_number(v) and holds(v) for v in pair):
            raise ValueError(f"config.{key}={pair!r} must be two numbers {rule}.")


def _check_combinations(config):
    objective, data, batch = config.objective, config.data, config.batch_size
    if (config.steps is None) == (config.epochs is None):
        raise ValueError(f"config: {config.steps=} and {config.epochs=}; set exactly one, and the other to None.")
    if config.schedule.warmup_epochs is not None and config.schedule.warmup_steps is not None:
        raise ValueError("config.schedule: warmup_epochs and warmup_steps are both set; set one to None.")
    if config.schedule.per_epoch and config.schedule.warmup_steps is not None:
        raise ValueError("config.schedule: per_epoch=True counts in epochs; give warmup_epochs, not warmup_steps.")
    if len(data.image_size) != 2 or not all(isinstance(side, int) and side > 0 for side in data.image_size):
        raise ValueError(f"config.data.image_size={data.image_size!r} must be (height, width) in pixels.")
    if len(data.mean) != len(data.std) or not all(s > 0 for s in data.std):
        raise ValueError(f"config.data: {data.mean=} and {data.std=} must have one entry per channel, std positive.")
    if batch % (parts := config.optimizer.accumulation):
        fix = f"the nearest are {batch // parts * parts or parts} and {(batch // parts + 1) * parts}"
        raise ValueError(f"config.batch_size={batch} must be divisible by optimizer.accumulation={parts}; {fix}.")
    if not 0 <= objective.label_smoothing < 1:
        raise ValueError(f"config.objective.label_smoothing={objective.label_smoothing} must be in [0, 1).")
    if objective.loss == "bce" and objective.label_smoothing:
        raise ValueError(
            f"config.objective.label_smoothing={objective.label_smoothing} with loss='bce' makes every target "
            "1; set label_smoothing=0.0 or loss='cross_entropy'."
        )
    if objective.ema is not None and not (_number(objective.ema) and 0 < objective.ema < 1):
        raise ValueError(f"config.objective.ema={objective.ema!r} must be a decay in (0, 1), or None.")


def override(config: ConfigDict, text: str) -> None:
    """Change one key, from text such as "data.workers=2".   Raises ValueError for a key or a type that is not known."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--config.{key}: give a value, --config.{key}=VALUE.")
    *sections, last = key.split(".")
    here = config
    for depth, name in enumerate([*sections, last]):
        in_model = sections[:1] == ["model"]
        if name not in here and not (in_model and depth == len(sections)):
            raise ValueError(f"--config.{key}: no key '{name}'{nearest(name, here)} (keys here: {', '.join(here)}).")
        if depth < len(sections):
            here = here[name]
            if not isinstance(here, ConfigDict):
                raise ValueError(f"--config.{key}: '{name}' is a value, not a section.")
    if isinstance(here.get(last), ConfigDict):
        raise ValueError(f"--config.{key}: this is a section; set one of {', '.join(here[last])} in it.")
    try:
        here[last] = _parse(value, here.get(last))
    except TypeError:
        kind = type(here[last]).__name__
        raise ValueError(f"--config.{key}={value}: not of the type {kind} of its default {here[last]!r}.") from None


def _parse(text, old):
    if text.lower() == "none":
        return None
    if isinstance(old, str):
        return text
    if text.lower() in ("true", "false"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _update(config, values):
    for key, value in values.items():
        if isinstance(value, dict):
            _update(config[key], value)
        else:
            config[key] = tuple(value) if isinstance(value, list) else value


def _flat(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        nested = isinstance(value, dict | ConfigDict)
        flat.update(_flat(value, f"{prefix}{key}.") if nested else {prefix + key: value})
    return flat


def _get(config, key):
    for name in key.split("."):
        config = config[name]
    return config


def _number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(key, value, known):
    if value not in known:
        raise ValueError(f"config.{key}={value!r} is not one of {', '.join(known)}{nearest(str(value), known)}.")
