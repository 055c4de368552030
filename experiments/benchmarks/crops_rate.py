"""Images per second and core of the views of self-distillation, beside Pillow alone.

    python -m experiments benchmarks.crops_rate  # about a minute on a CPU

The pipeline reads, decodes, crops, changes colours and collates (`equivit/data/views.py`), in one process.  Pillow
alone does the same decoding, crops and changes, drawn before the clock starts; its blur is its own.  Images are JPEG
files of 500 x 375 pixels, views two of 224 and eight of 96 as in DINOv2.  Both are also timed without colours, as with
`data.augment.device=True`.  Claims: the pipeline has at least 0.9 times the rate of Pillow alone.
"""

import io
from typing import NamedTuple

import ml_collections
import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from equivit.data import colour, crops
from equivit.data.batches import Share
from equivit.data.loader import TrainPipeline
from equivit.data.order import TrainOrder
from equivit.data.views import Kind, Views
from equivit.training import config as configs
from experiments import findings, flags, timing
from experiments.findings import Claim

SIZE, QUALITY = (375, 500), 90
LEAST = 0.9  # of Pillow's rate
ENHANCERS = dict(brightness=ImageEnhance.Brightness, contrast=ImageEnhance.Contrast, saturation=ImageEnhance.Color)


def main(arguments=None) -> int:
    options = flags.timing_parser(__doc__, __file__, runs=20, warmup=2)
    options.add_argument("--images", type=int, default=16, help="images in a batch (%(default)s)")
    options = options.parse_args(arguments)
    variants = {}
    for name, device in (("crops and colours", False), ("crops", True)):
        made, plans = pipeline(options.images, device)
        variants[name, "pipeline"] = lambda made=made: made.make(0)
        variants[name, "Pillow"] = lambda source=made.source, plans=plans: alone(source, plans)
    seconds = timing.medians(timing.interleaved(variants, warmup=options.warmup, runs=options.runs))
    rates = {key: options.images / value for key, value in seconds.items()}
    rows = [row(name, rates[name, "pipeline"], rates[name, "Pillow"]) for name in ("crops and colours", "crops")]
    print(findings.table(rows, dict(name="", pipeline="images/s", pillow="Pillow alone", ratio="ratio")))
    claims = [Claim(f"{each['name']}: pipeline over Pillow", each["ratio"], at_least=LEAST) for each in rows]
    return findings.finish(options, dict(runs=options.runs, images=options.images, rows=rows), claims)


def row(name: str, pipeline: float, pillow: float) -> dict:
    return dict(name=name, pipeline=pipeline, pillow=pillow, ratio=timing.ratio(pipeline, pillow))


class Files:
    """JPEG files in memory: noise of all scales, of 80 kB, so that decoding takes as long as with photographs."""

    classes, channels = (), 3

    def __init__(self, count: int):
        self.files = [self._file(np.random.default_rng(i)) for i in range(count)]

    def _file(self, rng: np.random.Generator) -> bytes:
        layers = [rng.integers(0, 256, (side, side, 3), np.uint8) for side in (4, 16, 64, 256)]
        pixels = [np.asarray(Image.fromarray(layer).resize(SIZE[::-1])) for layer in layers]
        buffer = io.BytesIO()
        Image.fromarray(np.mean(pixels, 0).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
        return buffer.getvalue()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        return {"image": self.files[index]}

    def where(self, index: int) -> str:
        """The name of an image in messages."""
        return f"image {index}"


class View(NamedTuple):
    """The draws of one view."""

    box: crops.Box
    size: tuple[int, int]
    orientation: Image.Transpose | None
    changes: colour.Changes


def section(device: bool) -> ml_collections.ConfigDict:
    """The `data` section of DINOv2."""
    config = configs.get_base().data
    config.image_size, config.augment.scale, config.augment.device = (224, 224), (0.32, 1.0), device
    config.views.blur = (0.0, 0.9, 0.5)  # as the official code had them
    return config


def pipeline(images: int, device: bool) -> tuple[TrainPipeline, dict[int, list[View]]]:
    """The pipeline, and the draws for its first batch by image."""
    transform, order = Views(section(device), 3), TrainOrder(images, images, repeats=1, seed=0)
    epoch, examples, positions = order.rows(0)
    plans = {}
    for index, position in zip(examples.tolist(), positions.tolist(), strict=True):
        rng = order.generator(epoch, position)
        plans[index] = [draw(transform, kind, rates, rng) for kind in transform.kinds for rates in kind.rates]
    source = dict(source=Files(images), channels=3, max_pixels=SIZE[0] * SIZE[1], share=Share(images))
    return TrainPipeline(**source, order=order, transform=transform), plans


def draw(views: Views, kind: Kind, rates: colour.Rates, rng: np.random.Generator) -> View:
    """Draw one view, in the order of `Views`."""
    box = crops.random_resized_box(rng, *SIZE, kind.scale, views.ratio)
    orientation = crops.draw_orientation(rng, views.flip, views.octic)
    changes = colour.draw(rng, rates)
    return View(box, kind.size, orientation, colour.Changes() if views.device else changes)


def alone(source: Files, plans: dict[int, list[View]]) -> dict[int, list[np.ndarray]]:
    """The views of all images, by Pillow."""
    made = {}
    for index, views in plans.items():
        image = Image.open(io.BytesIO(source.files[index])).convert("RGB")
        made[index] = [np.array(by_pillow(image, view)) for view in views]
    return made


def by_pillow(image: Image.Image, view: View) -> Image.Image:
    top, left, height, width = view.box
    image = image.crop((left, top, left + width, top + height)).resize(view.size[::-1], Image.Resampling.BICUBIC)
    if view.orientation is not None:
        image = image.transpose(view.orientation)
    for name, value in view.changes.jitter:
        image = by_hue(image, value) if name == "hue" else ENHANCERS[name](image).enhance(value)
    if view.changes.grey:
        image = ImageOps.grayscale(image).convert("RGB")
    if view.changes.sigma:
        image = image.filter(ImageFilter.GaussianBlur(view.changes.sigma))
    return ImageOps.solarize(image) if view.changes.solarise else image


def by_hue(image: Image.Image, share: float) -> Image.Image:
    """Move the hue; a band has 8 bits and wraps around."""
    hue, saturation, value = image.convert("HSV").split()
    hue = hue.point([(level + int(255 * share)) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")
