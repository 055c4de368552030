"""Images per second and core of the views of self-distillation, beside Pillow alone.

    python -m experiments benchmarks.crops_rate  # about a minute on a CPU

The pipeline reads, decodes, crops, changes colours and collates (`equivit/data/views.py`), in one process.  Pillow
alone does the same decoding, crops and changes, drawn before the clock starts; its blur is its own.  Images are JPEG
files of 500 x 375 pixels, views two of 224 and eight of 96 as in DINOv2.  Both are also timed without colours, as with
`data.augment.device=True`.  Claims: the pipeline has at least 0.9 times the rate of Pillow alone.
"""

import functools
import io
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from equivit.data import colour, crops
from equivit.data.batches import Share
from equivit.data.loader import TrainPipeline
from equivit.data.order import TrainOrder
from equivit.data.views import Views
from equivit.training import config as configs
from experiments import findings, flags, timing
from experiments.findings import Claim

SIZE, QUALITY = (375, 500), 90
LEAST = 0.9  # of Pillow's rate
ENHANCERS = dict(brightness=ImageEnhance.Brightness, contrast=ImageEnhance.Contrast, saturation=ImageEnhance.Color)
CASES = {"crops and colours": False, "crops": True}  # data.augment.device


def main(arguments=None) -> int:
    options = flags.timing_parser(__doc__, __file__, runs=20, warmup=2, minutes=None)
    options.add_argument("--images", type=int, default=16, help="images in a batch (%(default)s)")
    options = options.parse_args(arguments)
    variants = {}
    for name, device in CASES.items():
        made, plans = pipeline(options.images, device)
        variants[name, "pipeline"] = functools.partial(made.make, 0)
        variants[name, "Pillow"] = functools.partial(alone, made.source, plans)
    rates = {key: 1e3 * options.images / time for key, time in timing.milliseconds(variants, options).items()}
    rows = [dict(name=name, pipeline=rates[name, "pipeline"], pillow=rates[name, "Pillow"]) for name in CASES]
    for row in rows:
        row["ratio"] = row["pipeline"] / row["pillow"]
    print(findings.table(rows, dict(name="", pipeline="images/s", pillow="Pillow alone", ratio="ratio")))
    claims = [Claim(f"{each['name']}: pipeline over Pillow", each["ratio"], at_least=LEAST) for each in rows]
    return findings.finish(options, dict(runs=options.runs, images=options.images, rows=rows), claims)


class Files:
    """JPEG files in memory: noise of all scales, of 80 kB, so that decoding takes as long as with photographs."""

    classes, channels = (), 3

    def __init__(self, count: int):
        self.files = []
        for i in range(count):
            rng, buffer = np.random.default_rng(i), io.BytesIO()
            layers = [rng.integers(0, 256, (side, side, 3), np.uint8) for side in (4, 16, 64, 256)]
            pixels = [np.asarray(Image.fromarray(layer).resize(SIZE[::-1])) for layer in layers]
            Image.fromarray(np.mean(pixels, 0).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
            self.files.append(buffer.getvalue())

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


def pipeline(images: int, device: bool) -> tuple[TrainPipeline, dict[int, list[View]]]:
    """The pipeline by the `data` section of DINOv2, and the draws for its first batch by image."""
    section = configs.get_base().data
    section.image_size, section.augment.scale, section.augment.device = (224, 224), (0.32, 1.0), device
    section.views.blur = (0.0, 0.9, 0.5)  # as the official code had them
    transform, order = Views(section, 3), TrainOrder(images, images, repeats=1, seed=0)
    epoch, examples, positions = order.rows(0)
    plans, each = {}, [(kind, rates) for kind in transform.kinds for rates in kind.rates]
    for index, position in zip(examples.tolist(), positions.tolist(), strict=True):
        rng, plans[index] = order.generator(epoch, position), []
        for kind, rates in each:  # in the order of `Views`
            box = crops.random_resized_box(rng, *SIZE, kind.scale, transform.ratio)
            orientation = crops.draw_orientation(rng, transform.flip, transform.octic)
            changes = colour.draw(rng, rates)
            plans[index].append(View(box, kind.size, orientation, colour.Changes() if device else changes))
    source = dict(source=Files(images), channels=3, max_pixels=SIZE[0] * SIZE[1], share=Share(images))
    return TrainPipeline(**source, order=order, transform=transform), plans


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
