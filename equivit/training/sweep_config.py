"""The configuration of a sweep over time series: every key with its default, and its checks.

A file of `configs/` begins with `get_base()`; `python -m equivit.sweep` reads it and changes single keys:

    python -m equivit.sweep --config=configs/timeseries.py --config.data.names=Crop,ElectricDevices ...

The `model` section holds fields of `models/patchtst.PatchTSTConfig`, for all models alike.
"""

import json
from typing import Any

from ml_collections import ConfigDict

from equivit import errors
from equivit.data.series import NORMALIZE
from equivit.models import patchtst
from equivit.training import config as configs

OF_DATA = ("length", "channels", "num_classes", "patches", "dropout")  # fields of a model that are not for `model`
CHOOSING = ("data.directory", "data.names", "models", "patches")  # which results there are, not what they are


def get_base() -> ConfigDict:
    """The recipe of Jumbo, Appendix A.3.2; what the paper leaves open is said beside the key."""
    config = ConfigDict(dict(seed=0, epochs=100, batch_size=256))
    config.models = ("patchtst", "patchtst_registers", "patchtst_jumbo")
    config.patches = (8, 42)
    config.model = dict()
    config.large = dict(names=("Sleep", "Tiselac", "FaceDetection"), epochs=20)
    config.data = dict(
        names=("synthetic",),
        directory=None,  # of .npz, .ts or .tsv files; None: by name through aeon
        normalize="training",  # open (`data/series.py`)
        split_seed=0,  # of the test set's halves; open
    )
    config.runs = dict(lr=(3e-3, 1e-3, 3e-4, 1e-4), dropout=(0.0, 0.1, 0.2))
    config.optimizer = configs.get_base().optimizer
    config.optimizer.update(name="adamw", weight_decay=0.02, clip=None)
    config.schedule = dict(warmup=0.1, min_lr=1e-8)  # warmup: a share of the steps, from 0
    return config


def validate(config: ConfigDict) -> None:
    """Refuse unknown keys and impossible values.

    Raises ValueError with one line: the key, its value, the rule, and the nearest valid name.
    """
    configs.check_keys(config, get_base())
    for key in ("models", "patches", "data.names", "runs.lr", "runs.dropout"):
        if not _get(config, key):
            raise ValueError(f"config.{key}=() must have an entry.")
    for name in config.models:
        errors.one_of("config.models", name, patchtst.VARIANTS)
    errors.one_of("config.data.normalize", config.data.normalize, NORMALIZE)
    for key in ("epochs", "large.epochs", "batch_size", "patches"):
        _whole(key, _get(config, key))
    rules = {
        "runs.lr": "positive",
        "runs.dropout": "in [0, 1)",
        "schedule.warmup": "in [0, 1)",
        "schedule.min_lr": "zero or more",
        "optimizer.weight_decay": "zero or more",
        "optimizer.eps": "positive",
    }
    for key, rule in rules.items():
        for value in _entries(_get(config, key)):
            errors.number(f"config.{key}", value, rule)
    if (config.optimizer.name, config.optimizer.accumulation) != ("adamw", 1):
        raise ValueError("config.optimizer: a sweep is run with name='adamw' and accumulation=1.")
    for key in OF_DATA:
        if key in config.model:
            raise ValueError(f"config.model.{key}: the data, `patches` and `runs` say this; leave it out.")
    patchtst.configuration("patchtst", length=1, channels=1, num_classes=1, **config.model)


def epochs(config: ConfigDict, name: str) -> int:
    """How long the runs on a set are."""
    return config.large.epochs if name in config.large.names else config.epochs


def recipe(config: ConfigDict) -> dict[str, Any]:
    """What a result depends on beside set, model and number of patches: plain JSON values by key."""
    return {key: value for key, value in _flat(json.loads(config.to_json())).items() if key not in CHOOSING}


def _whole(key, value):
    for entry in _entries(value):
        if not isinstance(entry, int) or isinstance(entry, bool) or entry < 1:
            raise ValueError(f"config.{key}={entry!r} must be a positive whole number.")


def _entries(value):
    return value if isinstance(value, tuple) else (value,)


def _get(config, key):
    for name in key.split("."):
        config = config[name]
    return config


def _flat(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
