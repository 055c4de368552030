"""What a config names: its model and its objective."""

from flax import nnx
from ml_collections import ConfigDict

from equivit import models
from equivit.objectives.objective import Objective
from equivit.objectives.supervised import Supervised
from equivit.training import config as configs

OBJECTIVES = {"supervised": Supervised}


def make_model(config: ConfigDict, rngs: nnx.Rngs) -> nnx.Module:
    """The model of the `model` section."""
    options = {key: value for key, value in config.model.items() if key != "name"}
    return models.create(config.model.name, rngs=rngs, **options)


def make_objective(config: ConfigDict) -> Objective:
    """The objective of the `objective` section; `config.model.num_classes` must be known.

    Raises ValueError for a name that is not in `OBJECTIVES`.
    """
    name = config.objective.name
    if name not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise ValueError(f"config.objective.name={name!r} is not one of {known}{configs.nearest(name, OBJECTIVES)}.")
    data = config.data
    return OBJECTIVES[name](config.objective, mean=data.mean, std=data.std, num_classes=config.model.num_classes)
