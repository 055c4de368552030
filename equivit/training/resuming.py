"""What a run may not change when it goes on: its model, and the steps that are done."""

import pathlib

from ml_collections import ConfigDict

from equivit.models import zoo
from equivit.objectives.registry import OBJECTIVES
from equivit.training import config as configs

EXECUTION = ("remat", "unroll")  # fields of a model that say how its blocks are run, not what they compute


def config_before(workdir: pathlib.Path) -> ConfigDict | None:
    """The configuration that the run in a directory was last started with, None where there is none."""
    path = workdir / "config.json"
    return configs.from_json(path) if path.is_file() else None


def check(workdir: pathlib.Path, config: ConfigDict, before: ConfigDict | None) -> None:
    """ValueError if the model, its objective, or what of it is trained, is not as before; arrays need not tell it."""
    if before is None:
        return
    fixed = [
        "objective.name",
        "optimizer.freeze",
        *(f"objective.{key}" for key in OBJECTIVES[config.objective.name].FIXED),
    ]
    if not _same_model(config, before):
        fixed += [key for key in configs.differences(before, config) if key.startswith("model.")]
    old, new = configs.flat(configs.plain(before)), configs.flat(configs.plain(config))
    for key in fixed:
        if new.get(key) != old.get(key) and key.removeprefix("model.") not in EXECUTION:
            given = repr(new[key]) if key in new else "its default"
            has = repr(old[key]) if key in old else "its default"
            kept = "what is trained" if key in ("objective.name", "optimizer.freeze") else "a model"
            raise ValueError(
                f"config.{key}={given}: the run in {workdir} has {has}, and {kept} stays as it is; give that value, "
                "or another --workdir."
            )


def _same_model(config, before):
    """Whether two `model` sections stand for one model: a default may be given or not, a size as a number or a pair."""
    sections = [{k: v for k, v in c.model.items() if k not in EXECUTION} for c in (config, before)]
    return sections[0] == sections[1] or zoo.configuration(**sections[0]) == zoo.configuration(**sections[1])


def check_length(config: ConfigDict, start: int, total: int) -> None:
    """ValueError if a run is to end before the step that it goes on from."""
    if start > total:
        key = "steps" if config.steps is not None else "epochs"
        raise ValueError(
            f"config.{key}={config[key]!r}: the run ends after step {total}, and the checkpoint is of step {start}; "
            f"give at least {start} steps, or another --workdir."
        )
