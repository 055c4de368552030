"""Which blocks' attention becomes depthwise convolution, and how: small ViTs on CIFAR-10, half of their blocks.

    python experiments/depthwise_cifar10.py --source=npz:/data/cifar10.npz

The rows and the stages are those of `experiments/depthwise_small.py`.  13 runs for each seed: the eleven rows, the
pretraining and the gates of DSP-2S.  The same command resumes a run.

Prints top-1 accuracy of test images, the chosen blocks, and every difference with the paper's on COCO; a difference is
called resolved when it is larger than twice its standard error over seeds, and no order is claimed.

Claim: before stage 2, the squared error of the replaced modules is with taps of least squares at most 0.6 of that with
Gaussian ones.  Exits 1 when it fails.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import depthwise_small, small_images
from experiments.depthwise_small import Study

KEYS = ["data.source=npz:cifar10.npz", "data.eval_split=test", "data.image_size=(32,32)", "model.image_size=(32,32)"]
KEYS += ["model.patch_size=4", "data.crop_ratio=1.0", "data.augment.crop=pad", *small_images.CIFAR10]
STUDY = Study("in1k,mae_b16", KEYS, 2, 64, "accuracy/top1", tuple(depthwise_small.ROWS))


def main(arguments=None) -> int:
    return depthwise_small.main(STUDY, __doc__, "depthwise_cifar10", arguments)


if __name__ == "__main__":
    sys.exit(main())
