"""Predict classes or label maps of image files, in this process.

    for found in Predictor(model, config, classes)(["a.jpg", "b.jpg"]):
        print(found.image, found.classes[0], found.probabilities[0])

Images are decoded by threads and prepared as in evaluation.
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from equivit import errors
from equivit.data import directories, reading, transforms
from equivit.evaluation import label_maps, predictions
from equivit.evaluation.protocol import offers
from equivit.models.model import ModelModule, check_input
from equivit.symmetry.groups import OCTIC

ImageLike = str | os.PathLike | np.ndarray  # a file, or uint8 [H, W, C]
SHIFTS = 8  # circular shifts of an image


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for one image; if it cannot be read, `error` says why and the rest is empty."""

    image: str  # its file; "" for an array
    classes: tuple[str, ...] = ()  # of a classifier, the most probable first
    probabilities: tuple[float, ...] = ()
    turned: float | None = None  # share of the eight orientations with the same class
    shifted: float | None = None  # share of eight circular shifts with the same class
    map: np.ndarray | None = None  # of a segmenter: the class of each pixel, int32 [H, W], at the size of the image
    error: str = ""


class Predictor:
    """A model that predicts from image files, and arrays uint8 [H, W, C].

    Args:
      model: a classifier or a segmenter, with parameters in float32.
      config: a config; `data` prepares the images, `evaluation.segmentation` sets the views of a segmenter.
      classes: names of the classes; numbers if they are unknown.
      top: number of most probable classes.
      batch_size: images per call of the model.
      orientations: whether to predict also on the eight orientations and on eight circular shifts.

    Raises ValueError if the model predicts neither classes nor label maps, or does not take such images.
    """

    def __init__(
        self,
        model: ModelModule,
        config: ConfigDict,
        classes: Sequence[str] = (),
        *,
        top: int = 5,
        batch_size: int = 32,
        orientations: bool = False,
    ):
        offered = offers(model)
        if not offered & {"logits", "maps"}:
            raise ValueError(
                f"a {type(model).__name__} without a head predicts no classes; fine-tune it first, with "
                "configs/finetune_folder.py."
            )
        self.segments, self._channels = "maps" in offered, model.config.input_shape[-1]
        crop = "squash" if self.segments and config.data.eval_crop == "centre" else config.data.eval_crop
        self.data = ConfigDict({**config.data, "eval_crop": crop})  # a crop would leave pixels without a class
        if self.segments and orientations:
            raise ValueError(
                "--orientations is for classifiers; for label maps use python -m equivit.evaluate "
                "--suite=segmentation_orientation,segmentation_shift."
            )
        number = model.config.num_classes
        self.classes = tuple(classes) if len(classes) == number else tuple(map(str, range(number)))
        self.top, self.orientations, self._batch_size = min(top, number), orientations, batch_size
        if self.data.eval_crop != "whole":
            check_input(model.config, "config.data.image_size", tuple(self.data.image_size), self._channels)
        self._predict = predictions.predictor(model, self.data.mean, self.data.std, config.get("precision", "float32"))
        self._views = label_maps.settings(config) if self.segments else None
        self._prepare = transforms.Evaluation(self.data)

    def __call__(self, images: Iterable[ImageLike]) -> Iterator[Prediction]:
        """Yield the prediction of each image, in order.

        Raises ValueError if a model's outputs are not finite.
        """
        images = iter(images)
        with ThreadPoolExecutor() as pool:
            while chunk := list(itertools.islice(images, self._batch_size)):
                read = list(pool.map(self._read, chunk))
                good = [k for k, (_, error) in enumerate(read) if not error]
                predict = self._maps if self.segments else self._labels
                found = dict(zip(good, predict([read[k][0] for k in good]), strict=True))
                for k, (image, (_, error)) in enumerate(zip(chunk, read, strict=True)):
                    name = "" if isinstance(image, np.ndarray) else os.fspath(image)
                    yield Prediction(name, error=error, **found.get(k, {}))

    def _read(self, image: ImageLike) -> tuple[Any, str]:
        """The decoded image (PIL), and why it cannot be read."""
        try:
            content = image if isinstance(image, np.ndarray) else directories.content(pathlib.Path(image))
            return reading.decode(content, self._channels, self.data.max_pixels), ""
        except MemoryError:
            raise
        except Exception as error:  # PIL's decoders raise nearly everything
            missing = isinstance(error, FileNotFoundError)
            return None, "there is no such file" if missing else errors.line(str(error)) or type(error).__name__

    def _labels(self, images: list[Image.Image]) -> Iterator[dict[str, Any]]:
        """The most probable classes of each image, batched by size."""
        pixels = [self._prepare({"image": image})["image"] for image in images]
        found: dict[int, dict[str, Any]] = {}
        for size in {array.shape for array in pixels}:
            members = [k for k, array in enumerate(pixels) if array.shape == size]
            padding = [members[-1]] * (_rounded_up(len(members)) - len(members))  # few sizes: each compiles a program
            rows = self._of_batch(np.stack([pixels[k] for k in (*members, *padding)]))
            found |= dict(zip(members, rows, strict=False))
        return (found[k] for k in range(len(images)))

    def _of_batch(self, images: np.ndarray) -> list[dict[str, Any]]:
        logits = self._predict(jnp.asarray(images))
        _check_finite(logits)
        values, labels = map(np.asarray, jax.lax.top_k(jax.nn.softmax(logits), self.top))
        rows = [
            dict(classes=tuple(self.classes[k] for k in best), probabilities=tuple(map(float, shares)))
            for best, shares in zip(labels, values, strict=True)
        ]
        if self.orientations:
            for name, share in self._stability(images, labels[:, 0]).items():
                for row, value in zip(rows, share.tolist(), strict=True):
                    row[name] = value
        return rows

    def _stability(self, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """The share of orientations and of shifts with the same best class, [B]."""
        offsets = np.random.default_rng(0).integers(1, images.shape[1:3], (SHIFTS, 2))
        copies = {
            "turned": (predictions.turned(element, images) for element in OCTIC.elements),
            "shifted": (np.roll(images, tuple(offset), (1, 2)) for offset in offsets),
        }
        return {
            name: np.mean([np.asarray(self._predict(copy).argmax(-1)) == labels for copy in several], axis=0)
            for name, several in copies.items()
        }

    def _maps(self, images: list[Image.Image]) -> Iterator[dict[str, Any]]:
        """The label map of each image, one image at a time since sizes differ."""
        assert self._views is not None
        for image in images:
            pixels = self._prepare({"image": image})["image"]
            batch = {"image": jnp.asarray(pixels[None]), "map": np.zeros((1, image.height, image.width), np.int32)}
            labels, finite = label_maps.predicted(self._predict, batch, self._views)
            _check_finite(jnp.where(finite, 0, jnp.nan))
            yield {"map": np.asarray(labels[0])}


def _rounded_up(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _check_finite(values: jax.Array) -> None:
    if not bool(jnp.isfinite(values).all()):
        raise ValueError("predict: the model's outputs are NaN or infinite; check its parameters and data.std.")
