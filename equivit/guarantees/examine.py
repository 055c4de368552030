"""Examine the symmetries of a model: proofs on random inputs, and measurements on images."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import precision
from equivit.data.pixels import normalize
from equivit.guarantees import measured, pictures
from equivit.guarantees.motions import Pair, shifts, turns
from equivit.guarantees.proof import BATCH, backbone, prove
from equivit.guarantees.report import Report
from equivit.models.model import ModelModule, check_input

SEEN = 8  # images whose features are compared block by block
Tell = Callable[[str], object]


class Images(NamedTuple):
    """Images uint8 [N, H, W, C], and mean and standard deviation per channel of pixel values in 0..1."""

    pixels: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, number: int) -> np.ndarray:
        """The first few images as inputs of the model, repeated if there are fewer."""
        rows = self.pixels[np.arange(number) % len(self.pixels)]
        return np.asarray(normalize(jnp.asarray(rows), self.mean, self.std))


def examine(
    model: ModelModule,
    *,
    name: str = "the model",
    size: Pair | None = None,
    at: str = "float32",
    images: Images | None = None,
    tell: Tell = lambda text: None,
) -> Report:
    """Compare the features of moved inputs with the moved features, and predictions on images.

    Args:
      model: any image model, with parameters in float32.
      size: (height, width) of the random inputs; None: of the images, or as the model was built for.
      at: the precision of the model (`precision.PRECISIONS`), beside float64.
      images: to measure predictions on, of that size.
      tell: called with lines of progress.

    Raises ValueError for a model of other inputs, of a size that it does not take, or whose features are zero or not
    finite; with images, also for a segmenter.
    """
    size = _checked(model, size or (None if images is None else images.pixels.shape[1:3]))
    square = takes_turned(model, size)
    if images is not None:
        measured.check(model)
    step = stride(model, size)
    period = getattr(backbone(model).config, "period", step)
    moves = (*turns(square), *shifts(step, _at_most(period, step, size)))
    inputs = np.random.default_rng(0).standard_normal((BATCH, *size, model.config.input_shape[-1]))
    proofs = []
    for kind in dict.fromkeys(("float64", at)):
        tell(f"Comparing features of {len(moves)} motions in {kind}.")
        proofs.append(prove(model, inputs, moves, at=kind))
    stability = seen = None
    if images is not None:
        tell(f"Comparing predictions on {len(images.pixels)} images.")
        stability = measured.measure(model, *images, at=at, square=square)
        seen = prove(model, images.normalised(SEEN), moves, at=at)
    return Report(name, tuple(proofs), stability, seen, square)


def draw(folder: pathlib.Path, model: ModelModule, found: Report, images: Images | None = None) -> None:
    """Draw the pictures of a report: deviations.png, features.png and, with images, angles.png."""
    pictures.deviations(folder / "deviations.png", found.proofs, found.seen)
    size = found.proofs[0].size
    if images is None:
        image = pictures.smooth(size, model.config.input_shape[-1]).astype(np.float32)
    else:
        image = images.normalised(1)[0]
    square = takes_turned(model, image.shape[:2])
    offset = (image.shape[0] // 3, image.shape[1] // 5)
    model = precision.cast(model, found.proofs[-1].precision)
    pictures.turned_features(folder / "features.png", model, image, square=square, offset=offset)
    if found.measured is not None:
        pictures.angles(folder / "angles.png", found.measured)


def stride(model: ModelModule, size: Pair) -> Pair:
    """The total stride (height, width) of a model's last map, in pixels."""
    image = jax.ShapeDtypeStruct((1, *size, model.config.input_shape[-1]), "float32")
    rows, columns = jax.eval_shape(lambda model, image: model.features(image), model, image).patches.stride
    return rows, columns


def _checked(model: ModelModule, size: Pair | None) -> Pair:
    """The size of the inputs, by default the model's own."""
    config = model.config
    if len(config.input_shape) != 3:
        raise ValueError(f"symmetry: a {type(model).__name__} takes series, not images; give an image model.")
    found: Pair = config.input_shape[:2] if size is None else size
    check_input(config, "--image_size", found, config.input_shape[-1])
    return found


def takes_turned(model: ModelModule, size: Pair) -> bool:
    """Whether the model takes images with swapped sides."""
    try:
        check_input(model.config, "turned images", size[::-1], model.config.input_shape[-1])
    except ValueError:
        return False
    return True


def _at_most(period: Pair, step: Pair, size: Pair) -> Pair:
    """The period, limited to the image and at least a stride."""
    rows, columns = (max(one, min(all_, whole)) for all_, one, whole in zip(period, step, size, strict=True))
    return rows, columns
