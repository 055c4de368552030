"""Label maps of images and of their shifted copies, by trained models side by side.

    python -m experiments tables.adaptive.masks runs/camvid/swin/seed_0 runs/camvid/adaptive/seed_0

Figures 5, A1 and A2 of "Making Vision Transformers Truly Shift-Equivariant" (arXiv 2305.16316).  Each row is a test
image of the first run: the image, its shifted copy, and for each model the label maps of both, the second shifted back.
Boxes surround pixels whose class the shift changed; their share is above.  Shifts are circular; with --kind=zeros zeros
come in, and only pixels of both copies count.  Claim: circular shifts change no pixel of an equivariant model.
"""

import pathlib

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy import ndimage

from equivit.data import loader
from equivit.evaluation import colours, predictions
from equivit.models.segmenter.model import SegmenterConfig
from equivit.training import checkpoints
from experiments import findings, flags
from experiments.findings import Claim

GAP = 3  # changed pixels that are so near to each other share a box
LEAST = 4  # pixels in a box


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="directories of trained segmentation models")
    parser.add_argument("--images", type=flags.at_least(1), default=3, help="how many (%(default)s)")
    parser.add_argument("--kind", choices=("circular", "zeros"), default="circular", help="of the shifts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of images and shifts (%(default)s)")
    options = parser.parse_args(arguments)
    loaded = {str(path): segmentation_run(path) for path in options.runs}
    images = pictures(next(iter(loaded.values())).config, options.images, options.seed)
    offsets = drawn(options.kind, images.shape[1:3], len(images), options.seed)
    maps = {name: compared(run, images, offsets, options.kind) for name, run in loaded.items()}
    rows, claims = [], []
    for name, (_, back, changed) in maps.items():
        shares = [percent(*pair) for pair in zip(back, changed, strict=True)]
        rows += [dict(model=name, image=k, offset=offsets[k].tolist(), changed=share) for k, share in enumerate(shares)]
        if options.kind == "circular" and getattr(loaded[name].model.config, "equivariant", False):
            claims.append(Claim(f"{name}: most pixels changed, %", max(shares), at_most=0))
    print(findings.table(rows, dict(model="model", image="image", offset="shift", changed="pixels changed, %")))
    status = findings.finish(options, dict(kind=options.kind, rows=rows), claims)
    draw(images, offsets, maps, options)
    return status


def segmentation_run(path: pathlib.Path) -> checkpoints.Loaded:
    """A run and its model; ValueError for one of another kind."""
    run = checkpoints.load_run(path)
    if not isinstance(run.model.config, SegmenterConfig):
        fix = "give a run of configs/segment.py or adaptive_ade20k.py"
        raise ValueError(f"{path}: its model has no label maps; {fix}.")
    return run


def pictures(config, count: int, seed: int) -> np.ndarray:
    """Test images, uint8 [count, H, W, C], cut to `data.image_size`."""
    data = config.data.copy_and_resolve_references().unlock()
    data.eval_crop = "centre"
    return next(iter(loader.evaluate(data, batch_size=count, seed=seed, shuffle=True).batches()))["image"]


def drawn(kind: str, size: tuple[int, ...], count: int, seed: int) -> np.ndarray:
    """(down, right) of each image, [count, 2], not zero: up to the whole image, or to an eighth to either side."""
    rng = np.random.default_rng(seed)
    if kind == "circular":
        return np.stack([rng.integers(1, side, count) for side in size], axis=1)
    return np.stack([rng.integers(1, side // 8 + 1, count) * rng.choice([-1, 1], count) for side in size], axis=1)


def compared(run, images: np.ndarray, offsets: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Label maps of the images, label maps of the copies shifted back, and their differences, [B, H, W] each."""
    data = run.config.data
    predict = predictions.predictor(run.model, data.mean, data.std, run.config.precision)
    copies = shifted(images, offsets, kind, np.round(255 * np.array(data.mean)))
    upright, moved = (np.asarray(predict(x)).argmax(-1) for x in (images, copies))
    back = shifted(moved[..., None], -offsets, "circular", np.zeros(1))[..., 0]
    seen = shifted(np.ones_like(upright)[..., None], -offsets, kind, np.zeros(1))[..., 0] > 0
    return upright, np.where(seen, back, -1), (upright != back) & seen


def percent(back: np.ndarray, changed: np.ndarray) -> float:
    """The share of changed pixels among pixels of both copies, in percent; `back` [H, W] is -1 elsewhere."""
    return float(100 * changed.sum() / (back >= 0).sum())


def shifted(images: np.ndarray, offsets: np.ndarray, kind: str, fill: np.ndarray) -> np.ndarray:
    """Images [B, H, W, C], each rolled by its offset; with "zeros" the border is filled by `fill` [C]."""
    result = np.stack([np.roll(image, tuple(offset), (0, 1)) for image, offset in zip(images, offsets, strict=True)])
    if kind == "zeros":
        for image, offset in zip(result, offsets, strict=True):
            rows, columns = (slice(by) if by >= 0 else slice(by, None) for by in offset)
            image[rows] = image[:, columns] = fill
    return result


def boxes(changed: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(top, left, height, width) around groups of changed pixels, bool [H, W]; small groups have none."""
    labels, _ = ndimage.label(ndimage.binary_dilation(changed, iterations=GAP))
    found = []
    for number, place in enumerate(ndimage.find_objects(labels), 1):
        rows, columns = np.nonzero(changed[place] & (labels[place] == number))
        if len(rows) >= LEAST:
            top, left = place[0].start + rows.min(), place[1].start + columns.min()
            found.append((int(top), int(left), int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1))
    return found


def draw(images: np.ndarray, offsets: np.ndarray, maps: dict[str, tuple], options) -> None:
    """A row for each image."""
    classes = 1 + max(int(one.max()) for upright, back, _ in maps.values() for one in (upright, back))
    palette = np.array([*colours.of_classes(classes), colours.VOID])
    height, width = images.shape[1:3]
    columns = 2 + 2 * len(maps)
    figure = Figure(figsize=(2.4 * columns, 0.5 + len(images) * 2.4 * height / width), layout="constrained")
    grid = figure.subplots(len(images), columns, squeeze=False)
    copies = shifted(images, offsets, options.kind, np.full(images.shape[-1], 127.0))
    for k, row in enumerate(grid):
        shown = [images[k], copies[k]]
        for upright, back, _ in maps.values():
            shown += [palette[upright[k]], palette[back[k]]]
        for axes, picture in zip(row, shown, strict=True):
            axes.imshow(picture, interpolation="nearest")
            axes.set_axis_off()
        for axes, (_, back, changed) in zip(row[3::2], maps.values(), strict=True):
            axes.set_title(f"{percent(back[k], changed[k]):.1f} % changed", fontsize=8, pad=2)
            for top, left, tall, wide in boxes(changed[k]):
                box = Rectangle((left - 1.5, top - 1.5), wide + 2, tall + 2, fill=False, color="yellow", linewidth=1.2)
                axes.add_patch(box)
    titles = ["image", "shifted copy", *("/".join(pathlib.Path(path).parts[-2:]) for path in maps)]
    for axes, title in zip([*grid[0, :2], *grid[0, 2::2]], titles, strict=True):
        axes.set_title(title, fontsize=9)
    figure.savefig(findings.picture(options), dpi=130)
