"""Predict the classes of images, or their label maps.

    python -m equivit.predict --input=runs/photos photos/test --output=predictions.csv
    python -m equivit.predict --input=deit_3_small_224_1k.pth cat.jpg dog.jpg --top=3
    find . -name "*.png" | python -m equivit.predict --input=runs/photos - --output=predictions.jsonl
    python -m equivit.predict --input=runs/camvid road.png --output=maps

Images are files, folders with everything below them, lists (.txt, one file a line), or - for a list on the standard
input.  --output is a table (.csv), JSON lines (.jsonl), or for a segmenter a directory of label maps: PNG files whose
values are the lines of classes.txt there, beginning with 0.  Without it, results are printed.  An image that cannot be
read has an `error` in its row; the exit status is then 1.

In Python:

    from equivit import predict

    model = predict.load("runs/photos", top=3)
    for found in model(["cat.jpg", "dog.jpg"]):
        print(found.image, found.classes, found.probabilities)
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import functools
import io
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from equivit import command, errors, files

if TYPE_CHECKING:
    from equivit.evaluation.predictor import Prediction, Predictor

ENDINGS = (".csv", ".jsonl")
NAMES = "surrogateescape"  # how Python reads and writes file names of any bytes


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_run, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("predict", __doc__)
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders, lists (.txt), or - for a list")
    parser.add_argument(
        "--input",
        required=True,
        help="a run directory, a saved model, or weights such as model.safetensors or hf:ORG/NAME",
    )
    parser.add_argument("--output", type=pathlib.Path, help="FILE.csv, FILE.jsonl, or a directory for label maps")
    parser.add_argument("--top", type=command.at_least(1), default=5, help="number of classes per image (5)")
    parser.add_argument("--batch_size", type=command.at_least(1), default=32, help="images per call of the model (32)")
    parser.add_argument("--weights", help="for a run: averaged (objective.ema), or student instead of teacher")
    parser.add_argument(
        "--orientations",
        action="store_true",
        help="also measure whether the class changes when the image turns or slides",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def load(place: str | os.PathLike, *, weights: str | None = None, **options: Any) -> "Predictor":
    """The model at a place, which predicts from image files and arrays.

    Args:
      place: a run directory, a saved model, or weights such as "model.safetensors" or "hf:ORG/NAME".
      weights: for a run, one of its objective's weights, such as "averaged"; None for the first.
      options: `top`, `batch_size` and `orientations` of `evaluation.predictor.Predictor`.

    Raises:
      FileNotFoundError: the place holds no model.
      ValueError: the model predicts neither classes nor label maps.
    """
    from equivit.evaluation.predictor import Predictor
    from equivit.training import loading

    place = os.fspath(place)
    config, model = loading.with_config(place, weights)
    return Predictor(model, config, loading.trained_on(place).classes, **options)


def _run(options: argparse.Namespace) -> None:
    images = list(listed(options.images))
    if not images:
        raise ValueError(f"{' '.join(options.images)}: there are no images in these lists.")
    if options.output is not None and options.output.suffix in ENDINGS:
        command.check_file("--output", options.output)
    chosen = dict(top=options.top, batch_size=options.batch_size, orientations=options.orientations)
    model = load(options.input, weights=options.weights, **chosen)
    write = _writer(options.output, model, images)
    _tell(f"Predicting {len(images)} images with {options.input}.")
    unreadable = []
    with write as one:
        for found in _tracked(model(images), len(images)):
            one(found)
            unreadable += [f"{found.image}: {found.error}"] if found.error else []
    if options.output is not None:
        _tell(f"Done: {options.output}")
    if unreadable:
        raise ValueError(f"{len(unreadable)} of {len(images)} images cannot be read, the first is {unreadable[0]}.")


def listed(arguments: Iterable[str]) -> Iterator[str]:
    """Yield the image files that arguments of the command name: files, folders, lists and - for the standard input.

    Raises FileNotFoundError for an argument that does not exist, or a folder without images; a file in a list may be
    missing, and its prediction says so.
    """
    from equivit.data import directories

    for argument in arguments:
        path = directories.expanded(argument)
        if argument == "-":
            yield from filter(None, map(str.strip, _standard_input()))
        elif path.is_dir():
            inside = sorted(str(file) for file in path.rglob("*") if directories.is_image(file) and not file.is_dir())
            if not inside:
                raise FileNotFoundError(
                    f"{argument}: there is no image in this folder ({', '.join(directories.FORMATS)})."
                )
            yield from inside
        elif not path.exists():
            raise FileNotFoundError(f"{argument}: there is no such file or folder{errors.nearest_path(path)}.")
        elif path.suffix == ".txt":
            lines = filter(None, map(str.strip, directories.lines(directories.text(path, NAMES))))
            yield from (str(path.parent / directories.expanded(line)) for line in lines)
        else:
            yield str(path)


def _standard_input() -> Iterable[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors=NAMES)
    return sys.stdin


def _writer(
    output: pathlib.Path | None, model: "Predictor", images: list[str]
) -> contextlib.AbstractContextManager[Callable[["Prediction"], Any]]:
    """A context that yields a function to write one prediction."""
    if model.segments:
        if output is None or output.suffix in ENDINGS:
            raise ValueError(f"--output={output}: this model predicts label maps; give a directory for PNG files.")
        return _maps(output, model.classes, images)
    if output is None:
        return contextlib.nullcontext(_print)
    if output.suffix not in ENDINGS:
        raise ValueError(f"--output={output} must end in {' or '.join(ENDINGS)}.")
    return _table(output, model)


def _print(found: "Prediction") -> None:
    best = zip(found.classes, found.probabilities, strict=True)
    words = [found.error or ", ".join(f"{name} {100 * share:.1f} %" for name, share in best)]
    words += [f"same class in {share:.0%} of {of}" for share, of in _stability(found) if share is not None]
    print(f"{errors.line(found.image)}: {'; '.join(words)}", flush=True)


def _stability(found):
    return (found.turned, "orientations"), (found.shifted, "shifts")


@contextlib.contextmanager
def _table(path: pathlib.Path, model: "Predictor") -> Iterator[Callable[["Prediction"], Any]]:
    """Write rows of a table, or JSON lines; the file appears when it is complete."""
    with files.replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", errors=NAMES, newline="") as file:
        if path.suffix == ".jsonl":
            yield lambda found: file.write(json.dumps(_object(found), ensure_ascii=False) + "\n")
            return
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_columns(model))
        yield lambda found: writer.writerow(_row(found, model))


def _object(found: "Prediction") -> dict[str, Any]:
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {name: value for name, value in values.items() if value not in (None, "", ()) or name == "image"}


def _columns(model: "Predictor") -> list[str]:
    best = [f"{name}{'' if k == 1 else f'_{k}'}" for k in range(1, model.top + 1) for name in ("class", "probability")]
    return ["image", *best, *(("turned", "shifted") if model.orientations else ()), "error"]


def _row(found: "Prediction", model: "Predictor") -> list[str]:
    best = [f"{x}" for pair in zip(found.classes, map("{:.6f}".format, found.probabilities), strict=True) for x in pair]
    best += [""] * (2 * model.top - len(best))
    stable = [("" if share is None else f"{share:.3f}") for share, _ in _stability(found)] if model.orientations else []
    return [found.image, *best, *stable, found.error]


@contextlib.contextmanager
def _maps(folder: pathlib.Path, classes: tuple[str, ...], images: list[str]) -> Iterator[Callable[["Prediction"], Any]]:
    """Write label maps as PNG files with a palette, in the folders of the images below their common one."""
    import numpy as np
    from PIL import Image

    from equivit.evaluation import colours

    if len(classes) > 256:
        raise ValueError(f"a PNG file with a palette holds 256 classes, and the model has {len(classes)}.")
    places = _places(folder, images)
    files.make_directory(folder)
    files.write_text(folder / "classes.txt", "".join(f"{name}\n" for name in classes))
    palette = np.round(255 * colours.of_classes(len(classes))).astype(np.uint8)

    def write(found: "Prediction") -> None:
        if found.map is None:
            return
        picture = Image.fromarray(found.map.astype(np.uint8))
        picture.putpalette(palette.tobytes())
        with files.replacing(places[found.image]) as unfinished:
            picture.save(unfinished)

    yield write


def _places(folder: pathlib.Path, images: list[str]) -> dict[str, pathlib.Path]:
    """The file of each image's label map.

    Raises ValueError if two images would have the same one, or if it is one of the images.
    """
    paths = {image: os.path.abspath(image) for image in images}
    above = os.path.commonpath([os.path.dirname(path) for path in paths.values()])
    places = {
        image: folder / pathlib.Path(os.path.relpath(path, above)).with_suffix(".png") for image, path in paths.items()
    }
    sources = collections.defaultdict(set)
    for image, place in places.items():
        sources[place].add(paths[image])
    originals = set(map(os.path.realpath, images))
    for place, of in sources.items():
        if len(of) > 1:
            one, other, *_ = sorted(of)
            raise ValueError(
                f"{errors.line(one)} and {errors.line(other)} would both have the label map {place}; rename one."
            )
        if os.path.realpath(place) in originals:
            raise ValueError(
                f"--output={folder}: the label map {place} would replace an image; give another directory."
            )
    return places


def _tracked(found: Iterable["Prediction"], total: int) -> Iterator["Prediction"]:
    """Yield the predictions, and tell the progress at each tenth of many."""
    for done, one in enumerate(found, start=1):
        yield one
        if total >= 1000 and done * 10 // total > (done - 1) * 10 // total:
            _tell(f"{done} of {total} images")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the standard output is for results


if __name__ == "__main__":
    sys.exit(main())
