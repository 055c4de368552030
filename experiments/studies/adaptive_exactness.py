"""How exactly adaptive models follow circular shifts of real images, beside their ordinary versions.

    python -m experiments studies.adaptive_exactness --cifar10=npz:cifar10.npz --blood_cells=npz:pbc_wbc96.npz

Small variants of the four families with random weights, and of a D8 ViT, which also follows the eight orientations
(p4m); its images are turned, too.  All images have 64 px and are rolled by the same random shifts.  Columns: the share
of copies with equal logits, to the last bit; the largest deviation, relative to the largest logit, in float64 of the
layers alone (`anchor=False`); there the smallest gap between the best and the second best choice, relative to the best;
and the share of copies to which the ordinary model gives another class.  The D8 ViT has no anchor: hashes of all views
of an image settle norms that are closer than rounding; "settled" is the share of images that need them in float32.

Claims: equal bits in float32 and bfloat16, for the D8 ViT at most 1e-5 in float32; at most 1e-10 in float64 unless a
gap is below 1e-9.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.data import loader, pixels
from equivit.precision import cast
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training import config as configs
from experiments import compiled_models, findings, flags
from experiments.findings import Claim

SIZE = 64
SWIN = dict(width=16, depths=(2, 2), num_heads=(1, 2), window_size=(4, 4), patch_size=2)
CVT = dict(widths=(16, 24), depths=(1, 2), num_heads=(1, 2), kernels=(7, 3), strides=(4, 2), paddings=(2, 1))
VIT = dict(width=64, depth=2, num_heads=2, patch_size=8)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Swin": ("swin_t", SWIN),
    "SwinV2": ("swinv2_t", SWIN),
    "CvT": ("cvt_13", CVT),
    "MViTv2": ("mvitv2_t", dict(width=16, depths=(1, 2))),
    "ViT": ("vit_s16", VIT),
    "D8 ViT": ("octic_vit_s16", dict(family="D8", **VIT)),
}
ROUNDING = 2.0**-17  # of `shifts.settled` in float32
COLUMNS = dict(model="", float32_equal="float32: equal, %", float32="deviation", bfloat16_equal="bfloat16: equal, %")
COLUMNS |= dict(bfloat16="deviation", float64="float64: deviation", gap="smallest gap", settled="settled, %")
COLUMNS |= dict(ordinary="ordinary: deviation", changed="class changed, %")


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    for source in ("--cifar10", "--blood_cells"):
        parser.add_argument(source, default="synthetic", help="the source, such as npz:<file> (%(default)s)")
    parser.add_argument("--models", type=flags.one_of(list(MODELS)), default=list(MODELS), help="(all)")
    parser.add_argument("--images", type=flags.at_least(1), default=8, help="of each source (%(default)s)")
    parser.add_argument("--shifts", type=flags.at_least(1), default=256)
    options = parser.parse_args(arguments)
    images = np.concatenate([pictures(getattr(options, name), options.images) for name in ("cifar10", "blood_cells")])
    offsets = np.random.default_rng(0).integers(0, SIZE, (options.shifts, 2))
    rows = {}
    for name in options.models:
        rows[name] = row(name, images, offsets)
        print(f"{name}: done", flush=True)
    print(f"{len(images)} images, {len(offsets)} shifts")
    small = ("float32", "bfloat16", "float64", "gap")
    shown = [found | {key: f"{found[key]:.1e}" for key in small} for found in rows.values()]
    print(findings.table(shown, COLUMNS))
    results = dict(rows=rows, images=len(images), shifts=len(offsets), size=SIZE)
    return findings.finish(options, results, claims_of(rows))


def pictures(source: str, count: int) -> np.ndarray:
    """The first test images of a source as a model takes them, float32 [count, SIZE, SIZE, 3]."""
    texts = [f"data.source={source}", f"data.image_size=({SIZE},{SIZE})", f"data.eval_examples={count}"]
    data = configs.load("configs/adaptive_cifar.py:10,swin_t", [*texts, "data.crop_ratio=1.0", "data.workers=0"]).data
    batch = next(iter(loader.evaluate(data, batch_size=count, seed=0).batches()))
    return np.asarray(pixels.normalize(batch["image"], data.mean, data.std), np.float32)


def row(name: str, images: np.ndarray, offsets: np.ndarray) -> dict[str, Any]:
    turned = OCTIC.elements if name == "D8 ViT" else ("e",)
    found: dict[str, Any] = dict(model=name, settled=None)
    for precision in ("float32", "bfloat16"):
        model = cast(build(name, adaptive=True), precision)
        found[f"{precision}_equal"], found[precision], _ = compared(model, images, copies(images, offsets, turned))
    if turned != ("e",):
        gaps = np.concatenate(gaps_of(build(name, adaptive=True), images))
        found["settled"] = 100 * float((gaps <= ROUNDING).mean())
    _, found["ordinary"], found["changed"] = compared(build(name), images, copies(images, offsets, turned))
    with jax.enable_x64(True):
        model, doubles = build(name, adaptive=True, anchor=False), images.astype(np.float64)
        model = jax.tree.map(lambda a: np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, model)
        _, found["float64"], _ = compared(model, doubles, copies(doubles, offsets, turned))
        found["gap"] = min(float(gap.min()) for gap in gaps_of(model, doubles))
    return found


def build(name: str, **options):
    base, fields_ = MODELS[name]
    return compiled_models.random_model(base, **fields_, image_size=(SIZE, SIZE), num_classes=10, **options)


def copies(images: np.ndarray, offsets: np.ndarray, turned: Sequence[str]) -> Iterator[np.ndarray]:
    """The images in some orientations, and each of these rolled by every offset."""
    for element in turned:
        view = np.asarray(fields.act_on_image(element, images))
        for offset in offsets:
            yield np.roll(view, tuple(offset), (1, 2))


def compared(model, images: np.ndarray, changed) -> tuple[float, float, float]:
    """Equal logits in percent, largest deviation relative to the largest logit, other classes in percent."""
    logits = np.asarray(_logits(model, images))
    equal, deviation, other, count = 0, 0.0, 0, 0
    for copy in changed:
        found = np.asarray(_logits(model, copy))
        equal += int((found == logits).all(-1).sum())
        other += int((found.argmax(-1) != logits.argmax(-1)).sum())
        deviation, count = max(deviation, float(np.abs(found - logits).max())), count + len(copy)
    return 100 * equal / count, deviation / float(np.abs(logits).max()), 100 * other / count


def gaps_of(model, images: np.ndarray) -> list[np.ndarray]:
    """The gap of every choice."""
    return [np.asarray(gap) for _, gap in _selections(model, images).values()]


_logits = jax.jit(lambda model, images: model(images).astype(jnp.promote_types(images.dtype, jnp.float32)))
_selections = jax.jit(lambda model, images: {name: tuple(c) for name, c in model.selections(images).items()})


def claims_of(rows: dict[str, dict]) -> list[Claim]:
    claims = []
    for name, found in rows.items():
        if found["settled"] is None:
            for precision in ("float32", "bfloat16"):
                claims.append(Claim(f"{name}: equal in {precision}, %", found[f"{precision}_equal"], at_least=100))
        else:
            claims.append(Claim(f"{name}: deviation in float32", found["float32"], at_most=1e-5))
        judged = found["gap"] > 1e-9
        claims.append(Claim(f"{name}: deviation in float64", found["float64"], at_most=1e-10, judged=judged))
    return claims
