"""Make a pretrained ViT faster in one command: fine-tune it, replace attention by convolution, export it.

    python -m equivit.accelerate --weights=dinov2:dinov2_vitb14_pretrain.pth --blocks=6 --workdir=/tmp/faster \
        --config=configs/depthwise.py:in1k,dinov2_b14 --config.data.source=tfds:imagenet2012
    python -m equivit.accelerate --input=runs/cifar --blocks=3 --workdir=/tmp/faster \
        --config=configs/depthwise.py:in1k --config.data.source=npz:cifar10.npz --config.data.image_size=32,32

1. start/    the model on patch tokens alone;
2. stage1/   fine-tuned on the data of the config;
3. sigma     Sigma of its attention, on at most --images training images;
4. fitted/   the --blocks of lowest Sigma replaced by depthwise convolution, with taps fitted by least squares;
5. stage2/   fine-tuned again, half as long;
6. both evaluated, exported as ONNX files and timed alternately on one core: before.onnx, after.onnx.

report.json has `metric`, `milliseconds` and `bytes`, each `before` and `after`, and `blocks`; report.md adds figures.
The same --workdir resumes.  The model comes from the weights, not from the config; keys such as
--config.model.drop_path=0.1 change its training.  --config.epochs and --config.batch_size are for stage 1; stage 2
halves both.  --fit_only skips training: it replaces and fits blocks of the given model.

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution", Sections 2 and 3.
"""

import argparse
import functools
import pathlib
import sys

from equivit import command, convert


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("accelerate", __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--weights", help="pretrained weights, SOURCE:FILE, such as dinov2:dinov2_vitb14_pretrain.pth")
    model.add_argument("--input", type=pathlib.Path, help="a run directory or a saved model")
    parser.add_argument("--config", required=True, help="configs/depthwise.py:TASK,BACKBONE")
    parser.add_argument("--blocks", required=True, type=int, help="number of blocks to replace")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="directory of all stages and the report")
    parser.add_argument("--images", type=int, default=1000, help="images for Sigma and fits (%(default)s)")
    parser.add_argument("--fit_only", action="store_true", help="skip training")
    parser.add_argument(
        "--num_heads", type=command.at_least(1), help="with --weights, if no published model has that width"
    )
    parser.add_argument("--image_size", type=command.size, help="with --weights, HEIGHT,WIDTH of the learned positions")
    parser.add_argument("--mlp", choices=convert.MLPS, help="with --weights, the activation, if no name determines it")
    parser.add_argument("--checkpoint_key", help="with --weights, the entry of a checkpoint, such as model_ema")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    from equivit.acceleration import plan, report, stages
    from equivit.training.run import lock

    changes = command.changes(rest, _parser())
    made = plan.make(options, changes)
    with lock.held(options.workdir / ".lock"):
        plan.claim(options, changes, made.weights)
        print(f"Done: {report.write(made.workdir, stages.run(made))}")


if __name__ == "__main__":
    sys.exit(main())
