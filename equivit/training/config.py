"""The configuration of a run: every key with its default, reading it from a file, and checking it.

A file of `configs/` begins with `get_base()` and changes what it needs; the command line changes more:

    python -m equivit.train --config=configs/quickstart.py:quicktest --config.optimizer.weight_decay=0.1

The `model` section is a name of the zoo and the arguments given to it; the zoo knows which it takes, all other
sections take the keys below and no others.
"""

import ast
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterable

from ml_collections import ConfigDict

from equivit import errors
from equivit.data import corruptions
from equivit.errors import is_number, nearest
from equivit.objectives.registry import OBJECTIVES

CROPS = ("random_resized", "simple_random", "none", "pad")
OPTIMIZERS = ("lamb", "lars", "adamw", "sgd")
SCHEDULES = ("cosine", "constant")
WHOLE = ("steps", "data.channels", "data.train_examples", "data.eval_examples", "schedule.warmup_steps")
SOURCES = ("digits", "synthetic", "tfds:<name>", "folder:<dir>", "npz:<file>")


def get_base(objective: str = "supervised") -> ConfigDict:
    """Every section with its defaults; values of None are "not set".

    The keys of the `objective` section are those of the objective named.  Raises ValueError for an unknown one.
    """
    errors.one_of("config.objective.name", objective, OBJECTIVES)
    config = ConfigDict(dict(seed=0, steps=None, epochs=None, batch_size=128, init=None))  # init: a run or saved model
    config.model = dict(name="vit_ti16")
    config.data = dict(
        source="digits",
        split="train",
        eval_split="test",
        image_size=(32, 32),  # height, width
        train_image_size=None,  # of the images that are loaded to train; None: the same
        channels=None,  # None: as the source has them
        train_examples=None,  # None: all
        eval_examples=None,
        workers=0,  # processes that decode and augment
        repeats=1,  # copies of an example in one batch (repeated augmentation)
        crop_ratio=1.0,  # evaluation: share of the resized side that the centre crop keeps
        corruption=None,  # evaluation: one of ImageNet-C's, such as "gaussian_noise" (data/corruptions.py)
        severity=5,  # of the corruption, 1 to 5
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
    config.objective = dict(name=objective, **OBJECTIVES[objective].DEFAULTS)
    config.optimizer = dict(
        name="lamb",
        weight_decay=0.02,
        betas=(0.9, 0.999),
        eps=1e-8,
        clip=1.0,  # largest global norm of the gradients; None: any
        momentum=0.9,  # sgd and lars only
        accumulation=1,  # micro-batches per step
        no_decay=(),  # patterns of logical names, such as "head.*", beside the objective's own rules
        layer_decay=None,  # of the learning rate from layer to layer, backwards from the head; such as 0.75
    )
    config.schedule = dict(
        name="cosine", lr=1e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=None, warmup_steps=None, per_epoch=False
    )
    config.mesh = dict(data=-1, fsdp=1)  # -1: the devices that are left
    config.checkpoint = dict(every_steps=None, every_seconds=None, keep=2)
    config.evaluation = dict(every_epochs=None, suite=("accuracy",), severities=(5,))  # severities: of corruptions
    config.evaluation.sar = dict(  # test-time adaptation (evaluation/adaptation.py)
        batch_size=64, lr=1e-3, momentum=0.9, rho=0.05, margin=0.4, decay=0.9, reset_below=0.2, official=False
    )
    config.log = dict(every_steps=50, tensorboard=True)
    return config


def load(path: str, overrides: Iterable[str] = (), *, check: Callable[[ConfigDict], None] | None = None) -> ConfigDict:
    """The checked configuration of `file.py` or `file.py:mode`, changed by overrides such as `data.workers=2`.

    `check` replaces `validate` where a command has a configuration of its own.

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
    (check or validate)(config)
    return config.lock()


def from_json(path: pathlib.Path) -> ConfigDict:
    """The configuration that a run wrote into its directory."""
    stored = json.loads(path.read_text())
    config = get_base(stored["objective"]["name"])
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
    name = config.objective.get("name") if isinstance(config.get("objective"), ConfigDict) else None
    base = get_base(name or "supervised")
    check_keys(config, base, "")
    errors.one_of("config.data.augment.crop", config.data.augment.crop, CROPS)
    errors.one_of("config.optimizer.name", config.optimizer.name, OPTIMIZERS)
    errors.one_of("config.schedule.name", config.schedule.name, SCHEDULES)
    if config.data.corruption is not None:
        errors.one_of("config.data.corruption", config.data.corruption, corruptions.NAMES)
    source = config.data.source.partition(":")[0]
    if source not in {known.partition(":")[0] for known in SOURCES}:
        errors.one_of("config.data.source", config.data.source, SOURCES)
    _check_numbers(config, base)
    _check_combinations(config)
    OBJECTIVES[name].check(config)


def check_keys(config: ConfigDict, base: ConfigDict, prefix: str = "") -> None:
    """Raise ValueError unless `config` has the keys of `base` and no others; a `model` section may have any."""
    for key in config:
        if key not in base:
            known = ", ".join(base)
            raise ValueError(f"config.{prefix}{key}: no such key{nearest(key, base)} (keys here: {known}).")
        if isinstance(base[key], ConfigDict):
            if not isinstance(config[key], ConfigDict):
                raise ValueError(f"config.{prefix}{key}={config[key]!r}: this is a section, not a value.")
            if prefix + key != "model":
                check_keys(config[key], base[key], f"{prefix}{key}.")
    for key in base:
        if key not in config:
            raise ValueError(f"config.{prefix}{key}: missing; begin the file with get_base().")


def _check_numbers(config, base):
    probability, positive, zero_or_more = "in [0, 1]", "positive", "zero or more"
    rules = {
        probability: ("data.augment.flip", "data.augment.erase"),
        positive: ("batch_size", "steps", "epochs", "data.train_examples", "data.eval_examples", "data.repeats",
                   "data.channels", "data.crop_ratio", "optimizer.eps", "optimizer.clip", "optimizer.accumulation",
                   "schedule.lr", "mesh.fsdp", "checkpoint.every_steps", "checkpoint.every_seconds",
                   "checkpoint.keep", "evaluation.every_epochs", "log.every_steps"),
        zero_or_more: ("seed", "data.workers", "data.augment.color_jitter", "optimizer.weight_decay",
                       "schedule.warmup_lr", "schedule.min_lr", "schedule.warmup_epochs", "schedule.warmup_steps"),
    }  # fmt: skip
    base = _flat(base)
    for rule, keys in rules.items():
        for key in keys:
            value = _get(config, key)
            if value is None and (base[key] is None or key == "optimizer.clip"):
                continue
            errors.number(f"config.{key}", value, rule)
    if config.optimizer.layer_decay is not None:
        errors.number("config.optimizer.layer_decay", config.optimizer.layer_decay, "in (0, 1)")
    for key, severities in {
        "data.severity": (config.data.severity,),
        "evaluation.severities": config.evaluation.severities or (None,),
    }.items():
        if not set(severities) <= set(corruptions.SEVERITIES):
            raise ValueError(f"config.{key}={_get(config, key)!r}: severities of corruptions are 1 to 5.")
    for key in WHOLE:
        if isinstance(value := _get(config, key), float):
            raise ValueError(f"config.{key}={value!r} must be a whole number.")
    if config.mesh.data != -1 and not (is_number(config.mesh.data) and config.mesh.data > 0):
        raise ValueError(f"config.mesh.data={config.mesh.data!r} must be positive, or -1 for the devices left.")
    ranges = {
        "optimizer.betas": ("in [0, 1)", lambda v: 0 <= v < 1),
        "data.augment.scale": ("in (0, 1]", lambda v: 0 < v <= 1),
        "data.augment.ratio": ("positive", lambda v: v > 0),
    }
    for key, (rule, holds) in ranges.items():
        pair = _get(config, key)
        if len(pair) != 2 or not all(is_number(v) and holds(v) for v in pair):
            raise ValueError(f"config.{key}={pair!r} must be two numbers {rule}.")


def _check_combinations(config):
    data, batch = config.data, config.batch_size
    if (config.steps is None) == (config.epochs is None):
        raise ValueError(f"config: {config.steps=} and {config.epochs=}; set exactly one, and the other to None.")
    if config.schedule.warmup_epochs is not None and config.schedule.warmup_steps is not None:
        raise ValueError("config.schedule: warmup_epochs and warmup_steps are both set; set one to None.")
    if config.schedule.per_epoch and config.schedule.warmup_steps is not None:
        raise ValueError("config.schedule: per_epoch=True counts in epochs; give warmup_epochs, not warmup_steps.")
    for key in ("image_size", "train_image_size"):
        if (size := data[key]) is None and key == "train_image_size":
            continue
        if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
            raise ValueError(f"config.data.{key}={size!r} must be (height, width) in pixels.")
    if len(data.mean) != len(data.std) or not all(s > 0 for s in data.std):
        raise ValueError(f"config.data: {data.mean=} and {data.std=} must have one entry per channel, std positive.")
    if batch % (parts := config.optimizer.accumulation):
        fix = f"the nearest are {batch // parts * parts or parts} and {(batch // parts + 1) * parts}"
        raise ValueError(f"config.batch_size={batch} must be divisible by optimizer.accumulation={parts}; {fix}.")


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
        words = isinstance(old, tuple) and all(isinstance(entry, str) for entry in old)
        return tuple(text.split(",")) if words else text


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
