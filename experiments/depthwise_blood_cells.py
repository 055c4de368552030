"""Depthwise convolution in the blocks of lowest, highest and random Sigma of small ViTs on blood cells (PBC).

    python experiments/depthwise_blood_cells.py --source=npz:/data/pbc_wbc96.npz

The rows and the stages are those of `experiments/depthwise_small.py`; images have 48 pixels, patches 6.  Six runs for
each seed.  The same command resumes a run.

Prints top-1 accuracy of test images, the chosen blocks, and every difference with the paper's on COCO; a difference is
called resolved when it is larger than twice its standard error over seeds.  Nothing is claimed.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import depthwise_small
from experiments.depthwise_small import Study

KEYS = ["data.source=npz:pbc_wbc96.npz", "data.eval_split=test", "data.image_size=(48,48)", "model.image_size=(48,48)"]
KEYS += ["model.patch_size=6", "data.crop_ratio=1.0", "data.augment.crop=pad"]
ROWS = ("stage 1", "attention", "lowest", "highest", "random")
STUDY = Study("in1k,mae_b16", KEYS, 3, 64, "accuracy/top1", ROWS)


def main(arguments=None) -> int:
    return depthwise_small.main(STUDY, __doc__, "depthwise_blood_cells", arguments)


if __name__ == "__main__":
    sys.exit(main())
