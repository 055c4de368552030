"""Depthwise convolution in the blocks of lowest and highest Sigma of small ViTs that segment CamVid.

    python experiments/depthwise_camvid.py --source=npz:/data/camvid_240x180.npz

The rows and the stages are those of `experiments/depthwise_small.py`, with the decoder of transposed convolutions; the
pretraining has a linear one, so that stage 1 begins with a new decoder.  Frames of 240 x 180 pixels are trained at 128
wide and 96 high, in patches of 8.  Five runs for each seed.  The same command resumes a run.

Prints mean IoU of the test frames, the chosen blocks, and every difference with the paper's on COCO; a difference is
called resolved when it is larger than twice its standard error over seeds.  Nothing is claimed.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import depthwise_small
from experiments.depthwise_small import Study

KEYS = ["data.source=npz:camvid.npz", "data.split=train", "data.eval_split=test", "data.void=(11,)"]
KEYS += ["data.image_size=(96,128)", "model.image_size=(96,128)", "model.num_classes=11", "model.patch_size=8"]
KEYS += ["objective.width=16"]
ROWS = ("stage 1", "attention", "lowest", "highest")
STUDY = Study("coco,mae_b16", KEYS, 10, 8, "segmentation/miou", ROWS, ["objective.decoder=linear"])


def main(arguments=None) -> int:
    return depthwise_small.main(STUDY, __doc__, "depthwise_camvid", arguments)


if __name__ == "__main__":
    sys.exit(main())
