"""Convert weights: public ones to a saved model, or a model to an official file.

python -m equivit.convert --input=hybrid_deit_huge_patch14.pth --output=models/h8_h14
python -m equivit.convert --input=hf:facebook/dinov2-small --output=models/dinov2_s14
python -m equivit.convert --to=octic_vits --input=models/h8_h14 --output=back.safetensors
python -m equivit.convert --to=hf --input=RUN --output=DIR --push=ORG/NAME   # a folder with a model card, to the Hub
"""

import argparse
import functools
import json
import math
import pathlib
import sys

from equivit import command, files

# The sources of pretrained/.
FORMATS = ("octic_vits", "flip", "transformers", "vit_jax", "cvt", "bixt", "clip", "siglip", "jumbo", "mae")
FORMATS += ("mae_autoencoder", "dinov2", "dinov3", "timm")
HUB = "hf"
MLPS = ("gelu", "gelu_tanh", "quick_gelu")
HINTS = ("num_heads", "image_size", "window_size", "num_classes", "family", "mlp", "head", "checkpoint_key")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_write if options.to else _read, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "convert", "Convert public weights to a saved model, or a model to an official file (--to)."
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument("--source", choices=FORMATS, help="the format of --input, if its names do not tell")
    to = "the format of --output; hf: a folder for the Hugging Face Hub"
    direction.add_argument("--to", choices=(*FORMATS, HUB), help=to)
    place = "file, folder or hf:ORG/NAME of weights; with --to, a saved model or a run directory"
    parser.add_argument("--input", required=True, help=place)
    output = "directory; with --to, a file, or for hf a directory"
    parser.add_argument("--output", required=True, type=pathlib.Path, help=output)
    parser.add_argument("--push", metavar="ORG/NAME", help="with --to=hf: upload to this repository too")
    heads = "heads per block, if no published model has that width; 3,6,12 by stage"
    parser.add_argument("--num_heads", type=_numbers, help=heads)
    size = "HEIGHT,WIDTH of the learned positions or the windows, if not square"
    parser.add_argument("--image_size", type=command.size, help=size)
    parser.add_argument("--window_size", type=command.size, help="HEIGHT,WIDTH of a SwinV2 window in tokens")
    parser.add_argument("--num_classes", type=command.at_least(1), help="another number of classes, with a new head")
    parser.add_argument("--family", help="H2 or I2, for flip models")
    parser.add_argument("--mlp", choices=MLPS, help="the activation, if no name determines it, as in CLIP")
    parser.add_argument("--head", type=pathlib.Path, help="official file of a DINOv2 linear head")
    parser.add_argument("--checkpoint_key", help="the entry of a checkpoint with the weights, such as model_ema")
    parser.add_argument(
        "--flavour", help="with --to: the spelling, such as deit or dinov2; the default suits the model"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _numbers(text: str) -> int | tuple[int, ...]:
    numbers = list(map(command.at_least(1), text.split(",")))
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def _read(options: argparse.Namespace) -> None:
    import jax
    from flax import nnx

    from equivit import pretrained
    from equivit.models import saved
    from equivit.training import loading

    if options.push is not None:
        raise ValueError(f"--push={options.push} is for --to={HUB}.")
    if options.flavour is not None:
        raise ValueError("--flavour is only for --to; without it the file determines the flavour.")
    print(f"Reading {options.input}{f' as {options.source}' if options.source else ''}.", flush=True)
    hints = {name: getattr(options, name) for name in HINTS}
    where = (options.source, options.input) if options.source else (options.input,)
    model = pretrained.load(*where, **{k: v for k, v in hints.items() if v is not None})
    data = pretrained.trained_on(options.input)
    if len(data.classes) != getattr(model.config, "num_classes", None):  # a new head has other classes
        data = data._replace(classes=(), examples=None)
    place = ":".join(where)
    data = data._replace(images={**data.images, **loading.normalisation(place, model.config)})
    saved.save(options.output, model, data)
    number = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"Done: {pretrained.describe(model.config)}, {number / 1e6:.2f} M parameters, in {options.output}.")


def _write(options: argparse.Namespace) -> None:
    import numpy as np

    from equivit import pretrained
    from equivit.pretrained import reading
    from equivit.training import loading

    for hint in HINTS:
        if getattr(options, hint) is not None:
            raise ValueError(f"--{hint} is only for --source, to read weights; saved models already contain it.")
    if options.push is not None and options.to != HUB:
        raise ValueError(f"--push={options.push} is for --to={HUB}, not --to={options.to}.")
    print(f"Reading the model in {options.input}.", flush=True)
    model, data, step = loading.load(pathlib.Path(options.input))
    of = "" if step is None else f" of step {step}"
    if options.to == HUB:
        return _write_repository(options, model, data, of)
    state = pretrained.state_dict(options.to, model, flavour=options.flavour)
    reading.write(options.output, state, {"classes": json.dumps(list(data.classes))} if data.classes else {})
    number = sum(np.size(tensor) for tensor in state.values())
    print(f"Done: {len(state)} tensors{of} with {number / 1e6:.2f} M entries, in {options.output}.")


def _write_repository(options: argparse.Namespace, model, data, of: str) -> None:
    """Write a saved model with a model card, and upload it if asked to."""
    from equivit import pretrained
    from equivit.models import saved
    from equivit.pretrained import card, hub
    from equivit.training import loading

    if options.flavour is not None:
        raise ValueError(f"--flavour={options.flavour} is for official files; --to={HUB} has none.")
    if options.push is not None:
        hub.check_repository(options.push)
    if loading.is_run(options.output):
        raise ValueError(f"--output={options.output}: is a run, whose config.json it would lose; give a new directory.")
    card.check(options.output)
    run, report = pathlib.Path(options.input), pathlib.Path(options.input) / "report.json"
    recipe = files.read_json(run / "config.json") if loading.is_run(run) else {}
    figures = files.read_json(report) if report.is_file() else {}
    saved.save(options.output, model, data)
    what = pretrained.describe(model.config)
    card.write(options.output, model, what, repository=options.push, data=data, recipe=recipe, figures=figures)
    print(f"Done: the model{of} with its card, in {options.output}.", flush=True)
    if options.push is not None:
        print(f"Pushed to {hub.push(options.output, options.push)}.")


if __name__ == "__main__":
    sys.exit(main())
