"""Convert weights: an official file to a saved model, or a model to an official file.

python -m equivit.convert --source=octic_vits --input=hybrid_deit_huge_patch14.pth --output=models/h8_h14
python -m equivit.convert --to=octic_vits --input=models/h8_h14 --output=back.safetensors
"""

import argparse
import functools
import json
import math
import pathlib
import sys

from equivit import command

# The sources of pretrained/.
FORMATS = ("octic_vits", "flip", "timm", "dinov2", "clip", "cvt", "bixt", "jumbo", "mae", "mae_autoencoder")
MLPS = ("gelu", "gelu_tanh", "quick_gelu")
HINTS = ("num_heads", "image_size", "window_size", "num_classes", "family", "mlp", "head", "checkpoint_key")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_write if options.to else _read, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("convert", "Convert official weights to a saved model (--source), or back (--to).")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--source", choices=FORMATS, help="the format of --input")
    direction.add_argument("--to", choices=FORMATS, help="the format of --output")
    parser.add_argument(
        "--input", required=True, type=pathlib.Path, help="official file; with --to, a saved model or a run directory"
    )
    parser.add_argument("--output", required=True, type=pathlib.Path, help="directory; with --to, a file")
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

    if options.flavour is not None:
        raise ValueError("--flavour is only for --to; with --source the file determines it.")
    print(f"Reading {options.input} as {options.source}.", flush=True)
    hints = {name: getattr(options, name) for name in HINTS}
    model = pretrained.load(options.source, options.input, **{k: v for k, v in hints.items() if v is not None})
    saved.save(options.output, model)
    number = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"Done: {pretrained.describe(model.config)}, {number / 1e6:.2f} M parameters, in {options.output}.")


def _write(options: argparse.Namespace) -> None:
    import numpy as np

    from equivit import pretrained
    from equivit.pretrained import reading
    from equivit.training import loading

    for hint in HINTS:
        if getattr(options, hint) is not None:
            raise ValueError(f"--{hint} is only for --source; saved models already contain it.")
    print(f"Reading the model in {options.input}.", flush=True)
    model, data, step = loading.load(options.input)
    of = "" if step is None else f" of step {step}"
    state = pretrained.state_dict(options.to, model, flavour=options.flavour)
    reading.write(options.output, state, {"classes": json.dumps(list(data.classes))} if data.classes else {})
    number = sum(np.size(tensor) for tensor in state.values())
    print(f"Done: {len(state)} tensors{of} with {number / 1e6:.2f} M entries, in {options.output}.")


if __name__ == "__main__":
    sys.exit(main())
