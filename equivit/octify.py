"""Make a pretrained plain ViT octic, without labels.

    python -m equivit.octify --weights=dinov2:dinov2_vits14_pretrain.pth --family=I8 --config=configs/octify.py \
        --workdir=/tmp/octic --config.data.source=folder:/data/images
    python -m equivit.octify --input=runs/plain --family=H8 --config=configs/octify.py --workdir=/tmp/octic \
        --config.data.source=npz:pbc_wbc96.npz --config.data.image_size=48,48

1. teacher/  the model without its head, with positions for the images of the config;
2. start/    its dense blocks after --blocks octic ones, with a linear map between them by least squares, on at most
             --images training images.  Three starts are compared by their error there, and the best is taken: every
             octic layer by least squares; patch kernels and positions projected onto the symmetric subspace; drawn;
3. stage1/   the octic blocks and the map learn the teacher's tokens after as many blocks; the dense blocks are frozen;
4. stage2/   the whole model learns the teacher's last features;
5. model/    the result, with the teacher's head.

H8 learns the teacher's features; I8 and D8 learn their average over the eight orientations, and are invariant.  D8 is
an I8 whose blocks are all octic, as in octic DINOv2.  report.md has, before and after, the agreement of the features,
their deviation under turns, GFLOPs, milliseconds, and the suite of the config: by default k-NN and a linear probe, left
out where the data have no labels.  It shows the features of a turned image.

The same --workdir resumes; with other weights or other options that decide on the models, it is refused.
--config.epochs or --config.steps is for both stages, a sixth of it for the first; other keys are for each of them.
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
    parser = command.parser("octify", __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--weights", help="pretrained weights, SOURCE:FILE or hf:ORG/NAME")
    model.add_argument("--input", type=pathlib.Path, help="a run directory or a saved model")
    parser.add_argument("--family", required=True, help="H8, I8 or D8")
    parser.add_argument("--config", required=True, help="octify, or a recipe with its objective")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="directory of all stages and the report")
    parser.add_argument("--blocks", type=int, help="number of octic blocks of H8 and I8 (half of them)")
    number = command.at_least(2)  # what is fitted and compared are differences between images
    parser.add_argument("--images", type=number, default=1000, help="images for fits and agreement (%(default)s)")
    command.add_hints(parser, convert.MLPS)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    from equivit import staged
    from equivit.octification import plan, report, stages

    changes = command.changes(rest, _parser())
    made = plan.make(options, changes)
    with staged.claimed(options, plan.DECISIONS, changes, staged.fingerprint(made.loaded)):
        print(f"Done: {report.write(made, stages.run(made))}")


if __name__ == "__main__":
    sys.exit(main())
