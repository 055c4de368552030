"""The configuration of a sweep over time series: every key with its default, and its checks.

A file of `configs/` begins with `get_base()`; `python -m equivit.sweep` reads it and changes single keys:

    python -m equivit.sweep --config=configs/timeseries.py --config.data.names=Crop,ElectricDevices ...

The `model` section holds fields of `models/patchtst.PatchTSTConfig`, for all models alike.
"""

from typing import Annotated, Any

from ml_collections import ConfigDict

from equivit import constraints
from equivit.constraints import Below1, NonNegativeFloat, OneOf, PositiveFloat, PositiveInt, Seed
from equivit.data.series import NORMALIZE
from equivit.models import zoo
from equivit.models.patchtst import model as patchtst
from equivit.training import config as configs
from equivit.training import optimizers

OF_DATA = ("length", "channels", "num_classes", "patches", "dropout")  # fields of a model that are not for `model`
TYPES: dict[str, Any] = dict(
    seed=Seed,
    epochs=PositiveInt,
    batch_size=PositiveInt,
    models=tuple[Annotated[str, OneOf(patchtst.NAMES)], ...],
    patches=tuple[PositiveInt, ...],
    large=dict(names=tuple[str, ...] | tuple[()], epochs=PositiveInt),
    data=dict(
        names=tuple[str, ...],
        directory=str | None,
        normalize=Annotated[str, OneOf(NORMALIZE)],
        split_seed=Seed,
    ),
    runs=dict(lr=tuple[PositiveFloat, ...], dropout=tuple[Below1, ...]),
    schedule=dict(warmup=Below1, min_lr=NonNegativeFloat),
)
CHOOSING = ("data.directory", "data.names", "models", "patches")  # choose results, and do not change them


def get_base() -> ConfigDict:
    """The recipe of Jumbo, Appendix A.3.2; the comments say what the paper leaves open."""
    config = ConfigDict(dict(seed=0, epochs=100, batch_size=256))
    config.models = ("patchtst", "patchtst_registers", "patchtst_jumbo")
    config.patches = (8, 42)
    config.model = dict()
    config.large = dict(names=("Sleep", "Tiselac", "FaceDetection"), epochs=20)
    config.data = dict(
        names=("synthetic",),
        directory=None,  # of .npz, .ts or .tsv files; None: by name through aeon
        normalize="training",  # open (`data/series.py`)
        split_seed=0,  # of the split of the test set into halves; open
    )
    config.runs = dict(lr=(3e-3, 1e-3, 3e-4, 1e-4), dropout=(0.0, 0.1, 0.2))
    config.optimizer = optimizers.DEFAULTS
    config.optimizer.update(name="adamw", weight_decay=0.02, clip=None)
    config.schedule = dict(warmup=0.1, min_lr=1e-8)  # warmup: share of the steps; the rate starts at 0
    return config


def validate(config: ConfigDict) -> None:
    """Refuse unknown keys and impossible values.

    Raises ValueError with one line: the key, its value, the rule, and the nearest valid name.
    """
    configs.check_keys(config, get_base())
    constraints.check_section("config", config, TYPES)
    optimizers.check(config.optimizer)
    if (config.optimizer.name, config.optimizer.accumulation) != ("adamw", 1):
        raise ValueError("config.optimizer: a sweep is run with name='adamw' and accumulation=1.")
    for key in OF_DATA:
        if key in config.model:
            raise ValueError(f"config.model.{key}: the data, `patches` and `runs` say this; leave it out.")
    zoo.configuration("patchtst", length=1, channels=1, num_classes=1, **config.model)


def _types(_: ConfigDict) -> dict[str, Any]:
    return dict(TYPES, optimizer=optimizers.TYPES, model=zoo.types_of("patchtst"))


SCHEMA = configs.Schema(validate, _types)


def epochs(config: ConfigDict, name: str) -> int:
    """How long the runs on a set are."""
    return config.large.epochs if name in config.large.names else config.epochs


def recipe(config: ConfigDict) -> dict[str, Any]:
    """The settings of a result besides the set, the model and the number of patches: plain JSON values by key."""
    return {key: value for key, value in configs.flat(configs.plain(config)).items() if key not in CHOOSING}
