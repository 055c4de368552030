"""Small adaptive backbones, images that decide their choices or leave them undecided, and their numbers."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.models.cvt.model import CvT
from tests.models.backbones import Pair, model

STRIDE = 8  # of all small models together, so that 64 shifts are all that differ for them
SHIFTS = list(itertools.product(range(STRIDE), repeat=2))
KINDS = ("random", "flat", "black", "period 2", "mirror", "pixel", "two objects")


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A small adaptive model.

    Attributes:
      small: the fields of its configuration.
      places: the number of places that each choice is made among.
      others: fields of models that do not follow every shift.
      shifts: further ones to test, larger than the stride.
      bfloat16: fields of the model that is tested in this type.
      unanchored: fields of the model that is tested without an anchor.
      share: multiply-adds of the published model, in units of those of the ordinary one.
    """

    small: dict[str, Any]
    places: dict[str, int]
    others: list[dict[str, Any]]
    shifts: tuple[Pair, ...] = ()
    bfloat16: dict[str, Any] = dataclasses.field(default_factory=dict)
    unanchored: dict[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 1.08

    @property
    def size(self) -> Pair:
        """The size of its images."""
        return self.small["image_size"]


# Maps of 8x4 and 4x2 tokens with windows of 2x2: in the last stage one window spans the columns.
SWIN = dict(depths=(2, 1), num_heads=(1, 2), patch_size=2, window_size=(2, 2), image_size=(16, 8), adaptive=True)
SWIN_FACTS: dict[str, Any] = dict(
    small=SWIN,
    places=dict(patch_embed=4, stage0_window=4, stage1_merge=4, stage1_window=2),
    others=[dict(adaptive=parts) for parts in (False, ("token", "merge"), ("window", "merge", "position"))],
)
# Maps of 8x4 and 4x2 tokens; the last stage has a class token.
CVT = dict(widths=(8, 12), depths=(1, 2), num_heads=(1, 2), kernels=(3, 3), strides=(2, 2), paddings=(1, 1))
CVT |= dict(image_size=(16, 8), adaptive=True)
CVT_CHOICES = ("stage0_embed", "stage1_embed", "stage0_layer0_kv", "stage1_layer0_kv", "stage1_layer1_kv")
MVIT = dict(depths=(1, 1), image_size=(32, 16), adaptive=True, class_token=False)
MVIT_PARTS = (("token", "pool"), ("pool", "position"), ("token", "position"))
ADAPTIVE = {
    "swin_t": Adaptive(**SWIN_FACTS),
    "swinv2_t": Adaptive(**SWIN_FACTS),
    "cvt_13": Adaptive(
        CVT,
        dict.fromkeys(CVT_CHOICES, 4),
        [dict(adaptive=parts, padding="circular") for parts in (False, ("token", "merge"))],
        share=1.12,
    ),
    "mvitv2_t": Adaptive(
        MVIT,
        dict(patch_embed=16, stage0_block0_kv=16, stage1_block0_q=4, stage1_block0_kv=4),
        [dict(adaptive=parts, padding="circular", depths=(1,)) for parts in MVIT_PARTS],
        shifts=((8, 0), (0, 8), (8, 8), (21, 13)),
        bfloat16=dict(depths=(1,)),
        unanchored=dict(class_token=True, depths=(2, 1)),  # with a scan of two blocks
        share=1.07,
    ),
}


@functools.cache
def small(name: str, **options: Any) -> Any:
    """The small adaptive model with every parameter random."""
    return model(name, **ADAPTIVE[name].small | options)


@jax.jit
def run(m: Any, x: Any) -> Any:
    """Logits, choices, and the grids after each block before the final norm."""
    last, seen = m.trunk(x, capture=tuple(range(m.config.depth)))
    grids = [m._features(at, x.shape[:1], False, {}).patches for at in seen.values()]
    choices = m.selections(x) if isinstance(m, CvT) else last.choices  # for others that would be a second pass
    return m.classify(m.pool(last)), choices, grids


def noise(size: Pair, batch: int = 2, seed: int = 2) -> np.ndarray:
    """Random images in float64."""
    return np.random.default_rng(seed).normal(size=(batch, *size, 3))


def pictures(size: Pair) -> np.ndarray:
    """An image of each kind, [kinds, *size, 3] in float32."""
    return np.stack([picture(kind, size) for kind in KINDS]).astype(np.float32)


def picture(kind: str, size: Pair) -> np.ndarray:
    """An image: some decide every choice, others leave some undecided."""
    rng, x = np.random.default_rng(5), np.zeros((*size, 3))
    if kind == "random":
        x = rng.normal(size=x.shape)
    elif kind == "flat":
        x += 0.7
    elif kind == "period 2":
        x[::2, ::2] = x[1::2, 1::2] = (1, -1, 0.5)
    elif kind == "mirror":
        x = rng.normal(size=x.shape)
        x = (x + x[:, ::-1]) / 2
    elif kind == "pixel":
        x[3, 5] = 2
    elif kind == "two objects":  # an odd number of half patches apart, so that two phases hold the same patches
        row, column = (8, 5) if size == (16, 8) else (19, 12)
        x[1:3, 2:4] = rng.normal(size=(2, 2, 3))
        x[row : row + 2, column : column + 2] = x[1:3, 2:4]
    return x


def in_float64(m: Any) -> Any:
    """The model with its arrays in float64."""
    return jax.tree.map(lambda a: a.astype(jnp.float64), m)


def check_slope(m: Any, x: Any) -> tuple[Any, Any, Any]:
    """In float64: the gradient by the image is the slope along a line; returns model, image, logits."""

    @jax.jit
    def sides(m, x):
        logits, back = jax.vjp(m, x)
        return logits, back(jnp.cos(logits))[0]

    with jax.enable_x64(True):
        m = in_float64(m)
        x, way = x.astype(np.float64), np.random.default_rng(6).normal(size=x.shape)
        logits, by_image = sides(m, x)
        ends = [np.sin(sides(m, x + step * way)[0]).sum() for step in (1e-5, -1e-5)]
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose((by_image * way).sum(), slope, rtol=1e-6)
        assert abs(slope) > 1e-3
        return m, x, logits
