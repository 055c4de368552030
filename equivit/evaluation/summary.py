"""Results of an evaluation as text, and the report at the end of a run."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterable

import jax
from flax import nnx
from ml_collections import ConfigDict

from equivit import files
from equivit.evaluation import runner
from equivit.evaluation.protocol import Run


def rows(results: dict) -> list[tuple[str, str]]:
    """The results of `runner.evaluate` as readable (name, value) lines."""
    return [line for name, result in results.items() for line in runner.PROTOCOLS[name].lines(result)]


def text(lines: list[tuple[str, str]]) -> str:
    """Lines with aligned columns."""
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def conclude(workdir: pathlib.Path, model: nnx.Module, results: dict, config: ConfigDict) -> str:
    """Write evaluation.json and the figures of a finished run; return its results and the paths of its files as text.

    All processes of a run must call it, because the parameters may be sharded over them; the first one writes.

    Args:
      workdir: the run directory, with metrics.jsonl.
      model: the trained model, on the current mesh.
      results: the results of `runner.evaluate`.
      config: the config of the run.
    """
    from equivit.evaluation import figures  # local import: matplotlib is slow and needed only at the end of a run

    places = {
        "checkpoints": workdir / "checkpoints",
        "metrics": workdir / "metrics.jsonl",
        "report": workdir / "report.json",
        "all results": workdir / "evaluation.json",
        "learning curves": workdir / "learning_curves.png",
    }
    if jax.process_index() == 0:
        write(workdir, results)
        figures.learning_curves(places["metrics"], places["learning curves"], runner.curves())
    places |= draw(workdir, model, config, results)
    return text([*rows(results), *((name, str(path)) for name, path in places.items())])


def draw(
    directory: pathlib.Path, model: nnx.Module, config: ConfigDict, names: Iterable[str]
) -> dict[str, pathlib.Path]:
    """Draw the patch filters of a model, if any, and the figures of protocols; return the paths by title.

    All processes must call it; the first one writes.

    Args:
      directory: the directory of the figures.
      model: the model, on the current mesh if there is one.
      config: the config of the run.
      names: the evaluated protocols.
    """
    from equivit.evaluation import figures

    places = {}
    if kernels := figures.patch_kernels(model):
        places["patch filters"] = directory / "patch_filters.png"
        if jax.process_index() == 0:
            figures.patch_filters(kernels, places["patch filters"])
    for name in names:
        protocol = runner.PROTOCOLS[name]
        if protocol.figure is not None:
            places[f"picture of {name}"] = directory / f"{name}.png"
            protocol.figure(Run(model, config, protocol, config.data, name), directory / f"{name}.png")
    return places


def write(directory: pathlib.Path, results: dict, **about: str) -> pathlib.Path:
    """Write evaluation.json, with `about` before the results; return its path.

    Raises OSError with the file's name on failure.
    """
    path = _path(directory)
    with _naming(path):
        files.write_text(path, json.dumps({**about, **results}, indent=2) + "\n")
    return path


def check_writable(directory: pathlib.Path) -> None:
    """OSError, with the file's name, if evaluation.json cannot be written in a directory."""
    path = _path(directory)
    with _naming(path), tempfile.TemporaryFile(dir=directory):  # files are written in the same directory, then renamed
        pass


def _path(directory):
    return pathlib.Path(directory) / "evaluation.json"


@contextlib.contextmanager
def _naming(path):
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error
