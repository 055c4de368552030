"""A saved model as a repository of the Hugging Face Hub: a `config.json` and a model card beside its files."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from equivit import files
from equivit.models.model import ModelModule
from equivit.pretrained import places
from equivit.trained_on import TrainedOn

SHOWN = 100  # classes in the card; config.json has all
OURS = {"library_name": "equivit", "model_type": "equivit"}  # in config.json
CODE = """\
```python
from equivit import pretrained

model = pretrained.load("{place}")
logits = model(images)  # [B, height, width, {channels}]
```
"""


def write(
    folder: pathlib.Path,
    model: ModelModule,
    what: str,
    *,
    repository: str | None,
    data: TrainedOn,
    recipe: Mapping[str, Any],
    figures: Mapping[str, float],
) -> None:
    """Write `config.json` and `README.md` into the directory of a saved model.

    Args:
      what: the model in one line.
      repository: ORG/NAME, for the title and the example; None for the name of the folder.
      data: its training data; names of classes go into both files.
      recipe: the configuration of its run; {} if it has none.
      figures: the final figures of its run by name.

    Raises:
      OSError: a file cannot be written.
    """
    labels = {str(label): name for label, name in enumerate(data.classes)}
    config: dict[str, Any] = dict(OURS)
    if labels:
        config |= {"id2label": labels, "label2id": {name: int(label) for label, name in labels.items()}}
    files.write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    place = f"hf:{repository}" if repository else str(folder)
    parts = [_header(model), f"# {repository or folder.name}\n", f"{what}.\n"]
    parts += [CODE.format(place=place, channels=model.config.input_shape[-1])]
    if figures:
        rows = [f"| {name.removeprefix('eval/')} | {value:.6g} |" for name, value in figures.items()]
        parts += ["## Figures\n", "\n".join(["| figure | value |", "|---|---|", *rows]) + "\n"]
    if data.classes:
        left = len(data.classes) - SHOWN
        names = ", ".join(data.classes[:SHOWN]) + (f", and {left} more in config.json" if left > 0 else "")
        parts += ["## Classes\n", f"{names}\n"]
    if recipe:
        parts += ["## Recipe\n", f"```json\n{json.dumps(recipe, indent=1)}\n```\n"]
    files.write_text(folder / "README.md", "\n".join(parts))


def check(folder: pathlib.Path) -> None:
    """ValueError if `write` would replace files of other origin, such as a run's."""
    present = [name for name in ("config.json", "README.md") if (folder / name).exists()]
    if present and not OURS.items() <= places.config(folder).items():
        raise ValueError(
            f"--output={folder}: its {' and '.join(present)} would be replaced, and this command did not write "
            f"{'them' if len(present) > 1 else 'it'}; give a new directory."
        )


def _header(model: ModelModule) -> str:
    """The metadata of the card, in YAML."""
    task = "image-feature-extraction" if getattr(model.config, "num_classes", None) is None else "image-classification"
    return f"---\nlibrary_name: equivit\npipeline_tag: {task}\ntags:\n- jax\n- flax\n- equivit\n---\n"
