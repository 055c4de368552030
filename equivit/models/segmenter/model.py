"""Semantic segmentation: a backbone that computes feature maps, and a decoder that computes logits per pixel.

| decoder        | backbones                                 | `models/segmenter/decoders.py` |
|----------------|-------------------------------------------|-----------------------------------|
| "upernet"      | with stages                               | `UperNet`, `AuxiliaryHead`        |
| "linear"       | all                                       | `LinearDecoder`                   |
| "convolutions" | all                                       | `ConvolutionDecoder`              |
| "octic"        | whose last blocks have fields (D8, D2)    | `OcticDecoder`                    |

With a backbone whose parts are all adaptive, `equivariant=True` makes the whole model shift-equivariant: the logits
shift with the image ("Making Vision Transformers Truly Shift-Equivariant", Section 4).  With a fully octic backbone,
"linear" and "octic" are equivariant under rotations and mirrors.
"""

import dataclasses
import itertools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints, errors
from equivit.constraints import NonNegativeInt, OneOf, PositiveInt
from equivit.layers import dense, invariants
from equivit.layers.convolution import MODES
from equivit.layers.dropout import Key, split
from equivit.layers.resizing import bilinear
from equivit.models.cvt.model import CvTConfig
from equivit.models.features import Features, Grid
from equivit.models.mobilenetv4.model import MobileNetV4Config
from equivit.models.model import ModelModule, Switched, check_headless
from equivit.models.mvit.model import MViTConfig
from equivit.models.segmenter import decoders
from equivit.models.segmenter.decoders import UPSAMPLING, holding
from equivit.models.swin.model import SwinConfig
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import JumboViTConfig

DECODERS = ("upernet", "linear", "convolutions", "octic")
Backbone = ViTConfig | JumboViTConfig | SwinConfig | CvTConfig | MViTConfig | MobileNetV4Config


@dataclasses.dataclass(frozen=True)
class SegmenterConfig:
    """The configuration of a segmentation model.

    Attributes:
      backbone: the configuration of the backbone, which has no head.
      num_classes: number of pixel classes.
      decoder: one of DECODERS.
      width: channels of UperNet, or of the first transposed convolution.
      padding: padding of the decoder's convolutions, "zeros" or "circular".
      equivariant: whether the decoder is shift-equivariant too and pads circularly; for adaptive backbones.  With only
        some parts adaptive, the backbone is not shift-equivariant, so neither is the model.
      upsampling: how an equivariant UperNet upsamples maps: "interpolate" (around the torus) or "unpool" (zeros between
        entries).
      auxiliary: UperNet has a second head on the penultimate stage, for an auxiliary loss.
      own_size: logits stay on the decoder's grid, and labels are resized to it for training and evaluation; otherwise
        logits are resized to the image.
      blocks: blocks of a ViT before the last, ascending.  The decoder reads the mean of their maps and the last one,
        each after the final norm.
    """

    backbone: Backbone
    num_classes: PositiveInt
    decoder: Annotated[str, OneOf(DECODERS)] = "upernet"
    width: PositiveInt = 512
    padding: Annotated[str, OneOf(MODES)] = "zeros"
    equivariant: bool = False
    upsampling: Annotated[str, OneOf(UPSAMPLING)] = "interpolate"
    auxiliary: bool = True
    own_size: bool = False
    blocks: tuple[NonNegativeInt, ...] | tuple[()] = ()

    def __post_init__(self):
        constraints.check_fields(self, "Segmenter")
        backbone, name = self.backbone, type(self.backbone).__name__.removesuffix("Config")
        check_headless("Segmenter", "the backbone", backbone)
        if self.decoder == "upernet" and len(self.ends) < 2:
            raise ValueError(
                f"Segmenter: decoder='upernet' joins the maps of stages, and a {name} has one map; take 'linear' or "
                "'convolutions', or a backbone with stages, such as swin_t."
            )
        if self.decoder == "octic" and not getattr(backbone, "ends_with_fields", False):
            raise ValueError(
                f"Segmenter: decoder='octic' takes fields, and the last blocks of this {name} have none; take "
                "'linear', or a backbone of family D8."
            )
        if self.equivariant and not self.parts:
            raise ValueError(
                f"Segmenter: equivariant=True needs an adaptive backbone, and this {name} has parts=(); create it with "
                "adaptive=True."
            )
        if self.parts and not self.equivariant:
            raise ValueError(
                f"Segmenter: the grids of this adaptive {name} begin where the content decides, and equivariant=False "
                "would leave the label maps displaced; set equivariant=True."
            )
        if self.equivariant and self.own_size:
            raise ValueError(
                "Segmenter: own_size=True leaves the logits on a grid that begins where the content decides, away from "
                "the labels; set own_size=False with equivariant=True."
            )
        if self.decoder == "convolutions" and self.width % 4:
            raise ValueError(
                f"Segmenter: width={self.width} is halved twice by decoder='convolutions', so it must be a multiple of "
                f"4; {errors.multiples(self.width, 4)}."
            )
        self._check_blocks()

    def _check_blocks(self):
        if not self.blocks:
            return
        if self.decoder == "upernet" or not isinstance(self.backbone, ViTConfig):
            raise ValueError(
                f"Segmenter: blocks={self.blocks} are maps of a ViT for a decoder of one size; leave it out for stages."
            )
        last = self.backbone.depth - 1
        if self.blocks != tuple(sorted(set(self.blocks))) or self.blocks[-1] >= last:
            raise ValueError(
                f"Segmenter: blocks={self.blocks} must ascend and lie below {last}, the last block, which is read too."
            )

    @property
    def ends(self) -> tuple[int, ...]:
        """The last block of each stage."""
        depths = getattr(self.backbone, "depths", None) or (self.backbone.depth,)
        return tuple(total - 1 for total in itertools.accumulate(depths))

    @property
    def read(self) -> tuple[int, ...]:
        """The blocks whose maps the decoder reads beside the last one."""
        return self.ends[:-1] if self.decoder == "upernet" else self.blocks

    @property
    def mode(self) -> str:
        """The padding of the decoder's convolutions."""
        return "circular" if self.equivariant else self.padding

    @property
    def patch_size(self) -> tuple[int, int] | None:
        """(height, width) of the backbone's patches in pixels; None if no patch size must divide the image."""
        return getattr(self.backbone, "patch_size", None)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the backbone that are adaptive."""
        return getattr(self.backbone, "parts", ())

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """Raise ValueError for a size that an adaptive backbone does not support."""
        if (check := getattr(self.backbone, "check_torus", None)) is not None:  # else only patches constrain it
            check(image_size)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.backbone.input_shape

    def build(self, rngs: nnx.Rngs) -> "Segmenter":
        return Segmenter(self, self.backbone.build(rngs), rngs=rngs)


class Segmenter(Switched):
    """A backbone and a segmentation decoder; see `SegmenterConfig`.

    Args:
      backbone: a model built from `config.backbone`.
      rngs: initialises the decoder.
    """

    head = None

    def __init__(self, config: SegmenterConfig, backbone: ModelModule, *, rngs: nnx.Rngs):
        self.config, self.backbone = config, backbone
        widths = config.backbone.map_widths  # of the last stage after the final norm
        pyramid = config.decoder == "upernet"
        # The backbone itself normalises the last stage's map.
        self.norms = nnx.List(
            [dense.LayerNorm(width, eps=config.backbone.norm_eps) for width in widths[:-1]] if pyramid else []
        )
        self.decoder = _decoder(config, widths, rngs)
        options: dict[str, Any] = dict(mode=config.mode, rngs=rngs)
        second = pyramid and config.auxiliary
        self.auxiliary = decoders.AuxiliaryHead(widths[-2], config.num_classes, **options) if second else None

    def __call__(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """Pixel logits [*B, H, W, num_classes] of images [*B, H, W, C] of any size that the backbone takes.

        With `own_size` they are [*B, h, w, num_classes], on the decoder's grid.  `key` and `train` are as in `Model`.
        """
        return self.both(images, key=key, train=train)[0]

    @property
    def drops(self) -> bool:
        return self.config.decoder == "upernet" or self.backbone.drops

    def both(
        self, images: jax.Array, *, key: Key = None, train: bool = False, frozen: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """The logits, and the logits of the auxiliary head, or None without one.

        Args:
          frozen: the backbone runs as in evaluation, also after `train()`, and without gradient.
        """
        key, train = self.switched(key, train)
        keys, batch = split(key, 3), images.shape[:-3]
        flat = images.reshape(-1, *images.shape[-3:])
        grids = self._grids(flat, key=None if frozen else keys[0], train=train and not frozen, frozen=frozen)
        found = [self.decoder(grids, key=keys[1], train=train)]
        if self.auxiliary is not None:
            found.append(self.auxiliary(grids[-2], key=keys[2], train=train))
        on = found[0].values if self.config.own_size else flat
        logits = [self._resized(grid, (on.shape[1], on.shape[2])) for grid in found]
        logits = [x.reshape(*batch, *x.shape[1:]) for x in logits]
        return logits[0], logits[1] if len(logits) > 1 else None

    def label_maps(self, images: jax.Array) -> jax.Array:
        """The class of every pixel, int32 [*B, H, W], or on the decoder's grid."""
        return self.evaluated()(images).argmax(-1).astype(jnp.int32)

    def features(self, images: jax.Array, **options) -> Features:
        """The features of the backbone."""
        return self.backbone.features(images, **options)

    def embedding(self, images: jax.Array) -> Features:
        """The features of the backbone before its first block."""
        return self.backbone.embedding(images)

    def pooled(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """The input of a classification head on the backbone."""
        return self.backbone.pooled(images, key=key, train=train)

    def _grids(self, images: jax.Array, *, key: Key, train: bool, frozen: bool) -> list[Grid]:
        """The maps that the decoder reads, of images [B, H, W, C]."""
        backbone = self.backbone.evaluated() if frozen else self.backbone
        found = backbone.features(images, blocks=self.config.read, norm=True, key=key, train=train)
        grids = (jax.lax.stop_gradient(found) if frozen else found).grids
        for i, norm in enumerate(self.norms):
            grids[i] = holding(grids[i], norm(grids[i].values))
        return grids

    def _resized(self, grid: Grid, size: tuple[int, int]) -> jax.Array:
        """Resize logits, in at least float32: [B, h, w, classes] -> [B, H, W, classes]."""
        x = grid.values.astype(jnp.promote_types(grid.values.dtype, jnp.float32))
        if not self.config.equivariant:
            return bilinear(x, size)
        return grid.to_image(bilinear(x, size, circular=True))


def _decoder(config: SegmenterConfig, widths: tuple[int, ...], rngs: nnx.Rngs) -> Any:
    backbone: Any = config.backbone
    classes, last, mode = config.num_classes, widths[-1], config.mode
    group = backbone.group if getattr(backbone, "ends_with_fields", False) else None
    match config.decoder:
        case "upernet":
            how: dict[str, Any] = dict(mode=mode, equivariant=config.equivariant, upsampling=config.upsampling)
            return decoders.UperNet(widths, config.width, classes, **how, rngs=rngs)
        case "linear":
            kind = None if group is None else invariants.create(backbone.invariant, last, group=group, rngs=rngs)
            return decoders.LinearDecoder(last, classes, invariant=kind, group=group, rngs=rngs)
        case "convolutions":
            return decoders.ConvolutionDecoder(last, config.width, classes, mode=mode, rngs=rngs)
        case _:
            return decoders.OcticDecoder(last, backbone.patch_size, classes, group=backbone.group, rngs=rngs)
