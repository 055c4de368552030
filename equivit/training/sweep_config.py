"""The configuration of a sweep over time series: every key with its default, and its checks.

A file of `configs/` begins with `get_base()`; `python -m equivit.sweep` reads it and changes single keys:

    python -m equivit.sweep --config=configs/timeseries.py --config.data.names=Crop,ElectricDevices ...
"""

import dataclasses
from typing import Annotated, Any

from ml_collections import ConfigDict

from equivit import sections
from equivit.constraints import Below1, NonNegativeFloat, OneOf, PositiveFloat, PositiveInt, Seed
from equivit.data.series import NORMALIZE
from equivit.models import zoo
from equivit.models.patchtst import model as patchtst
from equivit.training import config as configs
from equivit.training.optimizers import OptimizerConfig

OF_DATA = ("length", "channels", "num_classes", "patches", "dropout")  # fields of a model excluded from `model`
CHOOSING = ("data.directory", "data.names", "models", "patches")  # keys that select results, without changing them


@dataclasses.dataclass(frozen=True)
class LargeConfig:
    """`large`: large data sets, and their epochs."""

    names: tuple[str, ...] | tuple[()] = ("Sleep", "Tiselac", "FaceDetection")
    epochs: PositiveInt = 20


@dataclasses.dataclass(frozen=True)
class SeriesConfig:
    """`data`: the sets of time series."""

    names: tuple[str, ...] = ("synthetic",)
    directory: str | None = None  # directory of .npz, .ts or .tsv files; None: aeon, by name
    normalize: Annotated[str, OneOf(NORMALIZE)] = "training"  # open (`data/series.py`)
    split_seed: Seed = 0  # splits the test set into halves; open


@dataclasses.dataclass(frozen=True)
class RunsConfig:
    """`runs`: the learning rates and the dropout rates; each pair is a run."""

    lr: tuple[PositiveFloat, ...] = (3e-3, 1e-3, 3e-4, 1e-4)
    dropout: tuple[Below1, ...] = (0.0, 0.1, 0.2)


@dataclasses.dataclass(frozen=True)
class SweepScheduleConfig:
    """`schedule`: linear warm-up from 0 to the run's learning rate, then a cosine."""

    warmup: Below1 = 0.1  # share of the steps
    min_lr: NonNegativeFloat = 1e-8


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """The recipe of Jumbo, Appendix A.3.2; "open" marks our choices where the paper gives no value."""

    seed: Seed = 0
    epochs: PositiveInt = 100
    steps: PositiveInt | None = None  # instead of epochs: whole epochs that are at least as many
    batch_size: PositiveInt = 256
    models: tuple[Annotated[str, OneOf(patchtst.NAMES)], ...] = ("patchtst", "patchtst_registers", "patchtst_jumbo")
    patches: tuple[PositiveInt, ...] = (8, 42)
    model: Any = None  # fields of PatchTSTConfig, for all models alike
    large: LargeConfig = LargeConfig()
    data: SeriesConfig = SeriesConfig()
    runs: RunsConfig = RunsConfig()
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", weight_decay=0.02, clip=None)
    schedule: SweepScheduleConfig = SweepScheduleConfig()


def get_base() -> ConfigDict:
    """Return every key with its default."""
    return ConfigDict(dataclasses.asdict(SweepConfig(model={})))


def validate(config: ConfigDict) -> None:
    """Refuse unknown keys and impossible values.

    Raises ValueError with one line: the key, its value, the rule, and the nearest valid name.
    """
    if "objective" in config:
        raise ValueError(
            "config: this is the recipe of one run; add lists of values for a sweep, such as "
            "--sweep.schedule.lr=1e-3,3e-4, or train it by python -m equivit.train."
        )
    configs.check_keys(config, get_base())
    sections.check("config", config, sections.types_of(SweepConfig))
    if (config.optimizer.name, config.optimizer.accumulation) != ("adamw", 1):
        raise ValueError("config.optimizer: a sweep requires name='adamw' and accumulation=1.")
    for key in OF_DATA:
        if key in config.model:
            raise ValueError(f"config.model.{key}: the data, `patches` and `runs` determine it; leave it out.")
    zoo.configuration("patchtst", length=1, channels=1, num_classes=1, **config.model)


def _types(_: ConfigDict) -> dict[str, Any]:
    return {**sections.types_of(SweepConfig), "model": zoo.types_of("patchtst")}


SCHEMA = configs.Schema(validate, _types)


def epochs(config: ConfigDict, name: str, examples: int) -> int:
    """Return the epochs of the runs on a data set that has `examples` training series."""
    if config.steps is not None:
        return -(-config.steps // -(-examples // config.batch_size))
    return config.large.epochs if name in config.large.names else config.epochs


def recipe(config: ConfigDict) -> dict[str, Any]:
    """Return the settings of a result except data set, model and number of patches, as JSON values by key."""
    return {key: value for key, value in configs.flat(configs.plain(config)).items() if key not in CHOOSING}
