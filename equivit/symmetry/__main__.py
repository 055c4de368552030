"""Find which symmetries a model has, and at which block each of them breaks.

    python -m equivit.symmetry --input=runs/photos
    python -m equivit.symmetry --input=dinov2_vitb14_pretrain.pth --images=photos/test --output=symmetry
    python -m equivit.symmetry --input=runs/photos --assert=octic,shift

On random inputs, in float64 and at the precision of the model, features of moved images are compared with moved
features after the embedding, each block and the output: for the eight turns and mirrors, and for shifts along each axis
by every residue of the total stride and by every number of strides up to a period of the windows.  With --images,
predictions are compared on at most 200 of them, under turns, mirrors, shifts and every angle.

--output gets report.md, symmetry.json and pictures.  --assert names symmetries, octic, flip or shift: if one is broken,
one line says where, and the exit status is 1.
"""

import argparse
import functools
import pathlib
import sys
from typing import TYPE_CHECKING

from equivit import command, errors

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from equivit.guarantees.examine import Images

MOST = 200  # images


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_run, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("symmetry", __doc__)
    parser.add_argument(
        "--input",
        required=True,
        help="a run directory, a saved model, or weights such as model.safetensors or hf:ORG/NAME",
    )
    parser.add_argument("--images", help="a folder, a list (.txt) or a file of images to measure predictions on")
    parser.add_argument("--output", type=pathlib.Path, help="a directory for report.md, symmetry.json and pictures")
    parser.add_argument("--assert", dest="asserted", type=_symmetries, default=(), help="octic, flip, shift")
    parser.add_argument("--image_size", type=command.size, help="HEIGHT,WIDTH of the inputs (the model's own)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _symmetries(text: str) -> tuple[str, ...]:
    """The `type` of an argument of symmetries, separated by commas."""
    from equivit.guarantees.motions import SYMMETRIES

    names = tuple(text.split(","))
    for name in names:
        if name not in SYMMETRIES:
            raise argparse.ArgumentTypeError(
                f"{errors.shown(name)} is not one of {', '.join(SYMMETRIES)}{errors.nearest(name, SYMMETRIES)}"
            )
    return names


def _run(options: argparse.Namespace) -> None:
    from equivit import files
    from equivit.guarantees import examine, report
    from equivit.training import loading

    if options.output is not None:
        files.make_directory(options.output)  # before the work
    config, model = loading.with_config(options.input)
    size = options.image_size or tuple(model.config.input_shape[:2])
    images = None if options.images is None else _images(options.images, config.data, size)
    settings = dict(name=options.input, size=size, at=config.get("precision", "float32"), images=images)
    found = examine.examine(model, **settings, tell=_tell)
    for line in report.lines(found):
        print(line)
    if options.output is not None:
        examine.draw(options.output, model, found, images)
        print(f"Done: {report.write(options.output, found)}")
    if broken := [at for at in map(found.broken, options.asserted) if at is not None]:
        raise ValueError(f"{broken[0]}.")
    if "octic" in options.asserted and not found.turned:
        raise ValueError(f"octic: the model takes no images of {size[1]}x{size[0]}; give a square --image_size.")


def _images(place: str, data: "ConfigDict", size: tuple[int, int]) -> "Images":
    """At most MOST readable images of a place, evenly spread, prepared for the model."""
    import numpy as np

    from equivit.data import directories, reading, transforms
    from equivit.guarantees.examine import Images
    from equivit.predict import listed

    data = type(data)({**data, "image_size": size, "eval_crop": data.eval_crop.replace("whole", "centre")})
    prepare, files, found = transforms.Evaluation(data), list(listed([place])), []
    number = min(MOST, len(files))
    for file in (files[k * len(files) // number] for k in range(number)):
        try:
            content = directories.content(pathlib.Path(file))
            image = reading.decode(content, data.channels or 3, data.max_pixels)
        except (OSError, ValueError) as error:
            _tell(f"{file} is left out: {errors.line(str(error))}.")
            continue
        found.append(prepare({"image": image})["image"])
    if not found:
        raise ValueError(f"--images={place}: no image there can be read.")
    return Images(np.stack(found), data.mean, data.std)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the standard output is for results


if __name__ == "__main__":
    sys.exit(main())
