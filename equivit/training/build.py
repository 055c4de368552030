"""What a config names: its model and its objective."""

from flax import nnx
from ml_collections import ConfigDict

from equivit import models
from equivit.objectives.objective import Objective
from equivit.objectives.registry import OBJECTIVES


def make_model(config: ConfigDict, rngs: nnx.Rngs) -> nnx.Module:
    """The model of the `model` section."""
    options = {key: value for key, value in config.model.items() if key != "name"}
    return models.create(config.model.name, rngs=rngs, **options)


def make_objective(config: ConfigDict, **frozen: nnx.Module) -> Objective:
    """The objective of the `objective` section; `config.model.num_classes` must be known.

    `frozen` are the models that it uses and does not train, `teacher=` for one that distils (`start.frozen_models`).
    """
    return OBJECTIVES[config.objective.name].create(config, **frozen)
