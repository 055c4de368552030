"""Images that models are measured on: of the training split, or of another, which may be held out of it."""

import numpy as np

from equivit.depthwise.training_images import TrainingImages
from equivit.training import config as configs


def test_held_out_images_are_a_split_too():
    data = configs.get_base().data
    data.update(source="digits", split="train", eval_split="held_out", held_out=0.2, image_size=(8, 8), crop_ratio=1.0)
    data.update(mean=(0.5,), std=(0.5,))
    train, held_out = (TrainingImages(data, 10**6, batch_size=500, split=split) for split in (None, "held_out"))
    assert (train.found, held_out.found) == (1437 - 288, 288)
    first, second = ({image.tobytes() for batch in images for image in batch} for images in (train, held_out))
    assert len(first & second) < 3 and np.isfinite(next(iter(held_out))).all()
