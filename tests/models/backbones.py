"""Small backbones with random parameters, and the numbers that `backbones_test.py` expects of them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from equivit import logical
from equivit.models import zoo

Pair = tuple[int, int]


def head_input(m: Any, features: Any) -> np.ndarray:
    """The class token, or the mean of the last map."""
    return np.mean(features.patches.values, (1, 2)) if features.cls is None else np.asarray(features.cls)


def widened_mean(m: Any, features: Any) -> np.ndarray:
    """The mean of the last map after MobileNetV4's 1x1 convolution, by running statistics."""
    factor, shift = m.neck.norm.affine()
    return np.maximum(factor * (head_input(m, features) @ m.neck.conv.kernel[...][0, 0]) + shift, 0)


def normed_latent(m: Any, features: Any) -> np.ndarray:
    """The layer norm of BiXT's mean latent."""
    mean = np.asarray(features.registers).mean(-2)
    normed = (mean - mean.mean(-1, keepdims=True)) / np.sqrt(mean.var(-1, keepdims=True) + 1e-6)
    return normed * np.asarray(m.norm.scale[...]) + np.asarray(m.norm.bias[...])


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A small model of the zoo.

    Attributes:
      name: in the zoo.
      small: the fields of its configuration.
      sizes: for images (height, width), the grid of each stage.
      stages: (blocks, width, stride) of each stage.
      class_stages: the stages with a class token.
      registers: tokens of this role.
      head_input: the input of the head, from the features.
      variants: other fields for some of the sizes.
      unread: a pixel that its strides leave out, by size of the image.
      dropped: fields that make blocks drop, and the rates of its blocks.
      convolved: of models with batch norms, the name of the first one, and its input for images.
      norms: number of batch norms, where a run of blocks counts once.
      unfolded: those that folding leaves.
      layers: numbers of layers by logical name, and of the last layer.
      undecayed: ends of the names of tensors without weight decay.
      exact: whether it is compared in float64, as float32 rounds too much of it.
    """

    name: str
    small: dict[str, Any]
    sizes: dict[Pair, list[Pair]]
    stages: list[tuple[int, int, int]]
    layers: dict[str, int]
    undecayed: set[str] = dataclasses.field(default_factory=set)
    dropped: tuple[dict[str, Any], list[float]] = ({}, [])
    class_stages: tuple[int, ...] = ()
    registers: int = 0
    head_input: Callable[[Any, Any], Any] = head_input
    variants: dict[Pair, dict[str, Any]] = dataclasses.field(default_factory=dict)
    unread: dict[Pair, Pair] = dataclasses.field(default_factory=dict)
    convolved: tuple[str, Callable[[Any, Any], Any]] | None = None
    norms: int = 0
    unfolded: int = 0
    exact: bool = False

    @property
    def size(self) -> Pair:
        """The least even size of images."""
        return list(self.sizes)[-1]


# Maps of 8x12, 4x6 and 2x3 tokens: in the second the height is one window, in the third both sides are.
SWIN = dict(width=8, depths=(2, 2, 1), num_heads=(1, 2, 2), window_size=(4, 4), image_size=(32, 48), num_classes=5)
SWIN |= dict(mlp_ratio=2.0)
# Keys of 4x6 and 2x3 tokens.
CVT = dict(widths=(8, 12), depths=(2, 1), num_heads=(2, 3), kernels=(7, 3), strides=(4, 2), paddings=(2, 1))
CVT |= dict(image_size=(32, 48), num_classes=5, mlp_ratio=2.0)
MVIT = dict(width=8, depths=(1, 2, 1), image_size=(32, 48), num_classes=5, mlp_ratio=2.0, class_token=True)
# Every kind of block, with and without a residual sum.
STAGES = (
    "conv 3 s2 8",
    "fused 3 s2 e2 12, fused 1 e1 12, uib 0/3 e1 12",
    "uib 3/5 s2 e2 16, mqa 2x4 kv2 16, uib 3/0 e1 16",
    "uib 3/0 s2 e1 20, mqa 3x4 20, uib 0/0 e1 20",
    "conv 1 24",
)
MOBILENETV4 = dict(stages=STAGES, stem_width=6, head_width=10, layer_scale=0.5, num_classes=5)
EFFICIENTVIT = dict(widths=(4, 4, 6, 8, 12), depths=(1, 1, 2, 1, 1), neck_widths=(10, 9), head_channels=4)
EFFICIENTVIT |= dict(image_size=(50, 72), num_classes=5)
SHVIT = dict(widths=(32, 12), depths=(1, 2), partial_widths=(0, 5), qk_width=4, image_size=(49, 80), num_classes=5)
BIXT = dict(width=12, depth=3, latents=5, num_heads=3, kernel=(8, 6), patch_size=(4, 4), image_size=(12, 20))
BIXT |= dict(num_classes=5, mlp_ratio=2.0)

SWIN_LAYERS = {
    "patch_embed.kernel": 0,
    "patch_norm.scale": 0,
    "stages.0.blocks.1.mlp.fc1.weight": 2,
    "stages.1.merge.reduction.weight": 3,
    "stages.1.merge.norm.scale": 3,
    "stages.1.blocks.0.attention.proj.bias": 3,
    "stages.1.blocks.1.norm2.bias": 4,
    "stages.2.merge.reduction.weight": 5,
    "stages.2.blocks.0.attention.qkv.weight": 5,
    "norm.scale": 6,
    "head.weight": 6,
}
SWIN_FACTS: dict[str, Any] = dict(
    small=SWIN,
    # In the second, windows and merging fill maps up with zeros.
    sizes={(32, 48): [(8, 12), (4, 6), (2, 3)], (28, 44): [(7, 11), (4, 6), (2, 3)]},
    stages=[(2, 8, 4), (2, 16, 8), (1, 32, 16)],
    layers=SWIN_LAYERS,
    dropped=(dict(drop_path=(0.0, 0.8)), [0.0, 0.2, 0.4, 0.6, 0.8]),
)
BACKBONES = {
    backbone.name: backbone
    for backbone in (
        Backbone("swin_t", undecayed={"position.table"}, **SWIN_FACTS),
        Backbone(
            "swinv2_t",
            undecayed={"position.weight1", "position.bias1", "position.weight2", "logit_scale"},
            **SWIN_FACTS | dict(sizes={(28, 44): [(7, 11), (4, 6), (2, 3)]}),
        ),
        Backbone(
            "cvt_13",
            CVT,
            {(32, 48): [(8, 12), (4, 6)], (29, 46): [(7, 11), (4, 6)]},
            [(2, 8, 4), (1, 12, 8)],
            {
                "patch_embed.conv.kernel": 0,
                "patch_embed.norm.scale": 0,
                "stages.0.blocks.1.attention.conv_v.conv.kernel": 2,
                "stages.1.embed.conv.bias": 3,
                "stages.1.class_token": 3,
                "stages.1.blocks.0.attention.conv_q.norm.scale": 3,
                "stages.1.blocks.0.mlp.fc1.bias": 3,
                "norm.scale": 4,
                "head.weight": 4,
            },
            {"stages.1.class_token"},
            (dict(drop_path=(0.5, 0.0)), [0.0, 0.5, 0.0]),
            class_stages=(1,),
            variants={(29, 46): dict(class_token=False)},
            unread={(29, 46): (28, 45)},
            norms=6,
        ),
        Backbone(
            "mvitv2_t",
            MVIT,
            {(27, 45): [(7, 12), (4, 6), (2, 3)]},
            [(1, 8, 4), (2, 16, 8), (1, 32, 16)],
            {
                "patch_embed.kernel": 0,
                "class_token": 0,
                "stages.0.blocks.0.mlp.fc1.weight": 1,
                "stages.1.blocks.0.shortcut.weight": 2,
                "stages.1.blocks.0.attention.qkv.weight": 2,
                "stages.1.blocks.1.attention.pool_q.kernel": 3,
                "stages.2.blocks.0.attention.position.rows": 4,
                "norm.scale": 5,
                "head.weight": 5,
            },
            {"class_token", "position.rows", "position.columns"},
            (dict(drop_path=(0.0, 0.75)), [0.0, 0.25, 0.5, 0.75]),
            class_stages=(0, 1, 2),
        ),
        Backbone(
            "mobilenetv4_hybrid_medium",
            MOBILENETV4,
            {(75, 42): [(19, 11), (10, 6), (5, 3), (3, 2), (3, 2)]},
            [(1, 8, 4), (3, 12, 8), (3, 16, 16), (3, 20, 32), (1, 24, 32)],
            {
                "stem.conv.kernel": 0,
                "stages.0.0.conv.norm.scale": 1,
                "stages.2.1.attention.key_conv.conv.kernel": 6,
                "stages.4.0.conv.norm.bias": 11,
                "neck.conv.kernel": 12,
                "head.weight": 12,
            },
            dropped=(dict(drop_path=0.6), [i * 0.6 / 11 for i in range(11)]),
            head_input=widened_mean,
            convolved=("stem.norm", lambda m, x: m.stem.conv(x)),
            norms=27,
            unfolded=1,
        ),
        Backbone(
            "efficientvit_b0",
            EFFICIENTVIT,
            {(50, 72): [(13, 18), (7, 9), (4, 5), (2, 3)]},
            # In the first stage the block that halves the map is the only one.
            [(1, 4, 4), (2, 6, 8), (2, 8, 16), (2, 12, 32)],
            {
                "stem.blocks.0.reduce.norm.scale": 0,
                "stages.0.0.local.expand.conv.kernel": 1,
                "stages.1.1.local.depthwise.conv.kernel": 3,
                "stages.3.0.local.expand.conv.bias": 6,
                "stages.3.1.attention.pointwise.0.kernel": 7,
                "neck.linear.weight": 8,
                "head.weight": 8,
            },
            dropped=(dict(drop_path=(0.0, 0.6)), [i / 10 for i in range(7)]),
            head_input=lambda m, features: np.asarray(m.neck(features.patches.values)),
            convolved=("stem.conv.norm", lambda m, x: m.stem.conv.conv(x)),
            norms=3 + 3 + 6 + 3 + 3 + 1,
            exact=True,  # its quotients enlarge rounding where their denominators are small
        ),
        Backbone(
            "shvit_s1",
            SHVIT,
            {(49, 80): [(4, 5), (2, 3)]},
            [(1, 32, 16), (2, 12, 32)],
            {
                "patch_embed.3.conv.kernel": 0,
                "stages.0.blocks.0.conv.conv.norm.scale": 1,
                "stages.1.downsampling.merge.gate.fc1.bias": 2,
                "stages.1.blocks.0.mlp.fc1.conv.kernel": 2,
                "stages.1.blocks.1.attention.qkv.conv.kernel": 3,
                "head.norm.scale": 4,
                "head.linear.weight": 4,
            },
            dropped=(dict(drop_path=(0.0, 0.5)), [0.0, 0.25, 0.5]),
            convolved=("patch_embed.0.norm", lambda m, x: m.patch_embed[0].conv(x)),
            norms=4 + 3 + 9 + 5 + 1,
        ),
        Backbone(
            "bixt_ti_p16",
            BIXT,
            {(12, 20): [(3, 5)]},
            [(3, 12, 4)],
            {
                "latents": 0,
                "patch_embed.kernel": 0,
                "position.weight": 0,
                "blocks.2.cross.attention.latents.weight": 3,
                "norm.scale": 4,
                "head.bias": 4,
            },
            {"latents"},
            registers=5,
            head_input=normed_latent,
        ),
    )
}


@functools.cache
def model(name: str, **options: Any) -> Any:
    """A small model with every parameter and statistic random."""
    return randomised(zoo.abstract(name, **BACKBONES[name].small | options))


def randomised(abstract: Any) -> Any:
    """A model drawn by NumPy: matrices of unit gain, scales and variances near 1, biases and tables of size 1/2."""
    random = np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1 and not tensor.name.endswith((".rows", ".columns")):
            noise *= math.prod(tensor.shape[:-1]) ** -0.5
        else:
            noise = np.exp(0.2 * noise) if tensor.name.endswith(("scale", "variance")) else 0.5 * noise
        return noise.astype(np.float32)

    drawn = {tensor.name: draw(tensor) for tensor in tensors(abstract, nnx.Variable)}
    return logical.from_logical(abstract, drawn, nnx.Variable)


def tensors(module: Any, kind: Any = nnx.Param) -> list[Any]:
    """The logical tensors of a model."""
    return [tensor for table in logical.tensors(module, kind).values() for tensor in table.flat]


def images(size: Pair, batch: int = 2) -> np.ndarray:
    """Random images [batch, *size, 3]."""
    return np.random.default_rng(1).normal(size=(batch, *size, 3)).astype(np.float32)


call = jax.jit(lambda m, x: m(x))


@jax.jit
def run(m: Any, x: Any) -> Any:
    """Logits, and the features of all blocks."""
    return m(x), m.features(x, blocks=tuple(range(m.config.depth)))


def near(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
