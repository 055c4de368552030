"""Make a pretrained ViT faster in one command: fine-tune it, replace attention by convolution, export it.

    python -m equivit.accelerate --weights=dinov2:dinov2_vitb14_pretrain.pth --blocks=6 --workdir=/tmp/faster \
        --config=configs/depthwise.py:in1k,dinov2_b14 --config.data.source=tfds:imagenet2012
    python -m equivit.accelerate --input=runs/cifar --blocks=3 --workdir=/tmp/faster \
        --config=configs/depthwise.py:in1k --config.data.source=npz:cifar10.npz --config.data.image_size=32,32

1. start/    the model on patch tokens alone;
2. stage1/   fine-tuned on the data of the config;
3. sigma     Sigma of its attention, on at most --images training images;
4. fitted/   the --blocks of lowest Sigma, or the --heads in any blocks, replaced, with taps by --start;
5. stage2/   fine-tuned again, half as long;
6. both evaluated, exported as ONNX files and timed alternately on one core: before.onnx, after.onnx.

report.json has `metric`, `milliseconds` and `bytes`, each `before` and `after`, and `blocks`; report.md adds figures.
Without a head there is no metric; `features` then has the cosine and the relative squared error between the patch
tokens before and after, of the last block and of each, on images of the test split.  --half adds float16 files.

The same --workdir resumes; with other weights or other options that decide on the models, it is refused.  The model
comes from the weights, not from the config; keys such as --config.model.drop_path=0.1 change its training.
--config.epochs and --config.batch_size are for stage 1; stage 2 halves both.  --fit_only skips training: it replaces
and fits blocks of the given model.

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution", Sections 2 and 3; --form=released is the
code of its authors (`layers/depthwise.py`), and least squares are ours (`depthwise/fit.py`).
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
    parser.add_argument("--config", required=True, help="depthwise:TASK,BACKBONE")
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument("--blocks", type=int, help="number of blocks to replace")
    number.add_argument("--heads", type=int, help="number of single heads to replace, in any blocks; for dw and conv")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="directory of all stages and the report")
    parser.add_argument("--kind", default="dw", help="dw, conv, spvit, ens_dw or identity (%(default)s)")
    parser.add_argument("--form", default="released", help="released or printed (%(default)s)")
    parser.add_argument("--order", default="lowest", help="of Sigma: lowest, highest or random (%(default)s)")
    starts = "of the taps: least_squares, projection, blur, normal or uniform (the nearest that the kind has)"
    parser.add_argument("--start", help=starts)
    parser.add_argument("--images", type=int, default=1000, help="images for Sigma and fits (%(default)s)")
    parser.add_argument("--fit_only", action="store_true", help="skip training")
    parser.add_argument("--half", action="store_true", help="also export and time float16 files")
    parser.add_argument("--realtime", action="store_true", help="time with real-time priority on the core")
    command.add_hints(parser, convert.MLPS)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    from equivit import staged
    from equivit.acceleration import plan, report, stages

    changes = command.changes(rest, _parser())
    made = plan.make(options, changes)
    with staged.claimed(options, plan.DECISIONS, changes, made.weights):
        print(f"Done: {report.write(made, stages.run(made))}")


if __name__ == "__main__":
    sys.exit(main())
