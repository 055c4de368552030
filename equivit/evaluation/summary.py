"""Results of an evaluation as text, and the report at the end of a run."""

import contextlib
import json
import pathlib
import tempfile

import jax
from flax import nnx
from ml_collections import ConfigDict

from equivit import files
from equivit.evaluation import runner
from equivit.evaluation.protocol import Run
from equivit.objectives.registry import OBJECTIVES

FILE = "evaluation.json"
ABOUT = ("weights", "data", "image_size", "step")  # what was evaluated on what


def rows(results: dict) -> list[tuple[str, str]]:
    """The results of `runner.evaluate` as readable (name, value) lines."""
    return [line for name, result in results.items() for line in runner.PROTOCOLS[name].lines(result)]


def text(lines: list[tuple[str, str]]) -> str:
    """Lines with aligned columns."""
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def subject(config: ConfigDict, *, step: int | None, weights: str | None = None) -> dict[str, str]:
    """The values of ABOUT: the evaluated weights, and the images.

    Args:
      step: of the weights of a run; None for a saved model.
      weights: of the objective's weights; None for those that a run exports by default, or for a saved model.
    """
    default = "trained" if step is None else OBJECTIVES[config.objective.name].weights[0]
    whole, size = config.data.eval_crop == "whole", "x".join(map(str, config.data.image_size))
    found = dict(
        weights=weights or default,
        data=f"{config.data.source}, {config.data.eval_split}",
        image_size="their own size" if whole else size,
    )
    return found if step is None else {**found, "step": str(step)}


def conclude(workdir: pathlib.Path, model: nnx.Module, results: dict, config: ConfigDict, *, step: int) -> str:
    """Write evaluation.json and the figures of a run after its last step; return results and paths of files as text.

    All processes of a run must call it, because the parameters may be sharded over them; the first one writes.  The run
    directory has metrics.jsonl, the model is on the current mesh, and the results are of `runner.evaluate`.
    """
    from equivit.evaluation import figures  # local import: matplotlib is slow and needed only at the end of a run

    places = {
        "checkpoints": workdir / "checkpoints",
        "metrics": workdir / "metrics.jsonl",
        "report": workdir / "report.json",
        "all results": workdir / FILE,
        "learning curves": workdir / "learning_curves.png",
    }
    if jax.process_index() == 0:
        write(workdir, results, **subject(config, step=step))
        figures.learning_curves(places["metrics"], places["learning curves"], runner.curves())
    places |= draw(workdir, model, config, results)
    return text([*rows(results), *((name, str(path)) for name, path in places.items())])


def draw(directory: pathlib.Path, model: nnx.Module, config: ConfigDict, results: dict) -> dict[str, pathlib.Path]:
    """Draw the patch filters of a model, if any, and the figures of its results; return the paths by title.

    All processes must call it; the first one writes.  The model is on the current mesh if there is one.
    """
    from equivit.evaluation import figures

    places = {}
    if kernels := figures.patch_kernels(model):
        places["patch filters"] = directory / "patch_filters.png"
        if jax.process_index() == 0:
            figures.patch_filters(kernels, places["patch filters"])
    for name, result in results.items():
        protocol = runner.PROTOCOLS[name]
        if protocol.figure is not None:
            places[f"picture of {name}"] = directory / f"{name}.png"
            protocol.figure(Run(model, config, protocol, config.data, name), result, directory / f"{name}.png")
    return places


def write(directory: pathlib.Path, results: dict, **about: str) -> pathlib.Path:
    """Write evaluation.json, with `about` before the results; return its path.

    Results of other protocols stay in a file that agrees in ABOUT; any other is renamed to evaluation.1.json, ...

    Raises OSError with the file's name on failure.
    """
    path = directory / FILE
    with _naming(path):
        before = _stored(path)
        if {key: before.get(key) for key in ABOUT} != {key: about.get(key) for key in ABOUT}:
            if path.is_file():
                path.rename(files.numbered(path))
            before = {}
        files.write_text(path, json.dumps({**before, **about, **results}, indent=2) + "\n")
    return path


def _stored(path: pathlib.Path) -> dict:
    """The content of a file; {} if there is none, or it is damaged."""
    try:
        return files.read_json(path) if path.is_file() else {}
    except ValueError:
        return {}


def check_writable(directory: pathlib.Path) -> None:
    """OSError, with the file's name, if evaluation.json cannot be written in a directory."""
    # Files are written in the same directory, then renamed.
    with _naming(directory / FILE), tempfile.TemporaryFile(dir=directory):
        pass


@contextlib.contextmanager
def _naming(path):
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error
