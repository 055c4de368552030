"""Results of evaluations that lie in the directory of a run, with the settings that they were computed with."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from equivit import files
from experiments import findings


def load_or_evaluate(
    path: pathlib.Path, settings: Mapping[str, Any], evaluate: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """The results in a JSON file, evaluated and written where there is no file.

    Raises ValueError if they were evaluated with other settings; a file without settings is of an earlier version.
    """
    if not (found := findings.read_json(path)):
        found = {**evaluate(), "settings": settings}
        files.write_text(path, json.dumps(found, indent=1) + "\n")
    before = found.pop("settings", settings)
    if other := sorted(key for key in settings if before.get(key) != settings[key]):
        changes = ", ".join(f"{key}={before.get(key)!r}" for key in other)
        raise ValueError(f"{path} was evaluated with {changes}; give the same again, or remove it to evaluate again.")
    return found
