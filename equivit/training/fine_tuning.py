"""Complete a configuration that fine-tunes a model on any labelled images (configs/finetune_folder.py).

Keys that are None get their values from the weights at `config.init` and from the data at `config.data.source`.
"""

import contextlib
import io
from typing import Any

from ml_collections import ConfigDict

from equivit.data import held_out, sources
from equivit.data.config import PREPARATION, DataConfig
from equivit.models import zoo
from equivit.training import loading

# Keys of `data` that weights and data determine.
OF_WEIGHTS, OF_DATA = (*PREPARATION, "channels"), ("split", "eval_split", "held_out")
TRAIN = ("train", "training")
EVALUATION = ("validation", "val", "valid", "test", "testing", held_out.NAME)
HELD_OUT = 0.2  # of the images, if the data have no other split
WARMUP = 0.1  # of the epochs
# Fields of a model that belong to its former training or its data, not to its weights.
NOT_OF_WEIGHTS = ("image_size", "num_classes", "in_channels", "drop_path", "drop_path_groups", "dropout")
NOT_OF_WEIGHTS += ("remat", "unroll")


def complete(config: ConfigDict) -> None:
    """Fill in the model, the preparation of its images, the splits and the warm-up, where they are None or absent.

    - `model`: the fields of the weights' model, unless config.model.name is set.  Other keys of the section stay.
    - `data.image_size`, `mean`, `std`, `channels` and the rest of `PREPARATION`: as for the weights.
    - `data.split`, `eval_split`, `held_out`: the splits in the data; a fifth of each class is held out if there is one
      split alone.
    - `schedule.warmup_epochs`: a tenth of the epochs.

    Raises:
      FileNotFoundError: there are no such weights or data.
      ValueError: the model at `config.init` has no images or no name in the zoo, or the data have no training split.
    """
    if config.init is not None:
        _from_weights(config)
    for key in PREPARATION:
        if config.data[key] is None:
            config.data[key] = getattr(DataConfig, key)
    _from_data(config.data)
    if config.schedule.warmup_epochs is None and config.schedule.warmup_steps is None and config.epochs is not None:
        config.schedule.warmup_epochs = round(WARMUP * config.epochs, 6)


def _from_weights(config: ConfigDict) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # the start of the run loads the model again, and reports
        model: Any = loading.load_with_hints(config.init, config.model).config
    model = getattr(model, "encoder", getattr(model, "backbone", model))
    images = loading.preparation(config.init, model)
    if "name" not in config.model:
        options = {key: value for key, value in zoo.options(model).items() if key not in NOT_OF_WEIGHTS}
        if getattr(model, "projection", None) is not None:
            options["projection"] = None  # of CLIP: a head of classes takes its place
        config.model = {**options, **config.model}
    for key, value in images.items():
        if config.data[key] is None:
            config.data[key] = value


def _from_data(section: ConfigDict) -> None:
    """Choose the training split and the split of the evaluation."""
    if section.split is None:
        section.split = next((name for name in TRAIN[1:] if _has(section, name, split=name)), TRAIN[0])
    sources.open_source(_changed(section, eval_split="", held_out=0.0), section.split)  # reports missing data
    if section.eval_split is None and not section.held_out:
        section.eval_split = next((name for name in EVALUATION if _has(section, name)), held_out.NAME)
    elif section.eval_split is None:
        section.eval_split = held_out.NAME
    if section.held_out is None:
        exists = section.eval_split != held_out.NAME or _has(section, held_out.NAME)
        section.held_out = 0.0 if exists else HELD_OUT


def _has(section: ConfigDict, name: str, **changes: Any) -> bool:
    """Whether the source has a split of this name with classes."""
    try:
        return bool(sources.open_source(_changed(section, eval_split=name, held_out=0.0, **changes), name).classes)
    except (ValueError, OSError):
        return False


def _changed(section: ConfigDict, **changes: Any) -> ConfigDict:
    return ConfigDict({**section.to_dict(), "train_examples": None, "eval_examples": None, **changes})
