"""Segmentation decoders: from the feature maps of a backbone to logits.

| decoder              | reads                  | logits                   | source                            |
|----------------------|------------------------|--------------------------|-----------------------------------|
| `UperNet`            | the map of every stage | on the first stage's map | arXiv 1807.10221, Section 3       |
| `LinearDecoder`      | the mean of maps       | on it                    | DINOv2 (arXiv 2304.07193)         |
| `ConvolutionDecoder` | the mean of maps       | on one 8 times as fine   | depthwise attention, Section A.2  |
| `OcticDecoder`       | the mean of maps       | on every pixel           | `isotypic.Unpatchify`             |

Maps are of the last block, and of others if `SegmenterConfig.blocks` lists them; for `OcticDecoder` they are fields.
Each map is a `Grid`, with its position on the image.  For an adaptive backbone, which chooses that position, decoders
are equivariant: they resize around the torus and align the maps.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.kernels.convolution import wrap_pad
from equivit.layers import dense, isotypic
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.convolution import Conv, Pair
from equivit.layers.dropout import Key, drop_channels
from equivit.layers.resizing import bilinear, unpooled
from equivit.models.features import Grid
from equivit.models.segmenter.pyramid_pooling import PyramidPooling, conv_unit
from equivit.symmetry import fields, shifts
from equivit.symmetry.groups import Group

UPSAMPLING = ("interpolate", "unpool")
DROPOUT = 0.1  # rate for channels, before the logits
GROUPS = 32  # of group norm; the greatest common divisor with the width is used


class UperNet(nnx.Module):
    """Pyramid pooling of the last stage's map, merged top-down with the maps of the earlier stages.

    All maps are then resized to the first, concatenated and convolved.

    Shapes: grids of decreasing size, [B, h_k, w_k, in_channels[k]] -> logits [B, h_0, w_0, classes].

    Args:
      mode: padding mode of all convolutions.
      equivariant: maps are aligned on the torus, and pyramid pooling is circular.
      upsampling: how maps of different stages are upsampled if equivariant, one of UPSAMPLING.
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        width: int,
        classes: int,
        *,
        mode: str,
        equivariant: bool,
        upsampling: str,
        rngs: nnx.Rngs,
    ):
        def units(channels, kernel):
            return nnx.List([conv_unit(c, width, kernel=(kernel, kernel), mode=mode, rngs=rngs) for c in channels])

        *finer, coarsest = in_channels
        self.pooling = PyramidPooling(coarsest, width, mode=mode, equivariant=equivariant, rngs=rngs)
        self.laterals = units(finer, 1)
        self.smoothing = units([width] * len(finer), 3)
        self.joint = conv_unit(len(in_channels) * width, width, kernel=(3, 3), mode=mode, rngs=rngs)
        self.logits = _logits(width, classes, rngs)
        self.upsampling = upsampling if equivariant else None

    def __call__(self, grids: Sequence[Grid], *, key: Key = None, train: bool = False) -> Grid:
        maps = [holding(g, unit(g.values, train=train)) for g, unit in zip(grids[:-1], self.laterals, strict=True)]
        maps.append(holding(grids[-1], self.pooling(grids[-1].values, train=train)))
        for k in range(len(maps) - 1, 0, -1):
            maps[k - 1] = holding(maps[k - 1], maps[k - 1].values + resized(maps[k], maps[k - 1], self.upsampling))
        for k, unit in enumerate(self.smoothing):
            maps[k] = holding(maps[k], unit(maps[k].values, train=train))
        first = maps[0]
        joined = jnp.concatenate([first.values, *(resized(grid, first, self.upsampling) for grid in maps[1:])], axis=-1)
        x = drop_channels(self.joint(joined, train=train), DROPOUT, key)
        return holding(first, self.logits(x))


class AuxiliaryHead(nnx.Module):
    """A convolution and logits on one map, for an auxiliary loss.

    Shapes: [B, h, w, in_channels] -> [B, h, w, classes].
    """

    def __init__(self, in_channels: int, classes: int, *, mode: str, rngs: nnx.Rngs):
        width = 256
        self.unit = conv_unit(in_channels, width, kernel=(3, 3), mode=mode, rngs=rngs)
        self.logits = _logits(width, classes, rngs)

    def __call__(self, grid: Grid, *, key: Key = None, train: bool = False) -> Grid:
        return holding(grid, self.logits(drop_channels(self.unit(grid.values, train=train), DROPOUT, key)))


class LinearDecoder(nnx.Module):
    """Batch norm and a linear map of each token; fields are made invariant first, so logits rotate with the image.

    Shapes: [B, h, w, in_channels] -> logits [B, h, w, classes].

    Args:
      invariant: an invariantization (`layers/invariants.py`) of the tokens; None for dense tokens.
      group: group of the field.
    """

    def __init__(self, in_channels: int, classes: int, *, invariant: Any, group: Any, rngs: nnx.Rngs):
        width = in_channels if invariant is None else invariant.out_features
        self.invariant, self.group = invariant, group
        self.norm = BatchNorm(width)
        self.logits = _logits(width, classes, rngs)

    def __call__(self, grids: Sequence[Grid], *, key: Key = None, train: bool = False) -> Grid:
        grid = averaged(grids)
        x = grid.values
        if self.invariant is not None:
            x = self.invariant(fields.from_dense(x, self.group))
        return holding(grid, self.logits(self.norm(x, train=train)))


class ConvolutionDecoder(nnx.Module):
    """Three transposed convolutions, each with group norm and GELU, then two convolutions.

    Shapes: [B, h, w, in_channels] -> logits [B, 8 h, 8 w, classes].

    The paper gives neither widths nor kernels.  With 256 channels in the first layer, half as many in each further
    layer, and kernels of 4 x 4 and 3 x 3, the number of parameters is close to its Table A.1, which leaves no room to
    concatenate several maps.
    """

    def __init__(self, in_channels: int, width: int, classes: int, *, mode: str, rngs: nnx.Rngs):
        widths = [in_channels, width, width // 2, width // 4]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.doubling = nnx.List([Doubling(one, other, mode=mode, rngs=rngs) for one, other in pairs])
        same: dict[str, Any] = dict(kernel=(3, 3), padding=(1, 1), mode=mode, rngs=rngs)
        self.conv = Conv(widths[-1], widths[-1], **same)
        self.logits = Conv(widths[-1], classes, **same)

    def __call__(self, grids: Sequence[Grid], *, key: Key = None, train: bool = False) -> Grid:
        grid = averaged(grids)
        x = grid.values
        for layer in self.doubling:
            x = layer(x)
        return holding(grid, self.logits(dense.gelu(self.conv(x))))


class OcticDecoder(nnx.Module):
    """An equivariant linear map from each token's field to the logits of its patch's pixels.

    Shapes: a field as dense tokens [B, h, w, in_channels] -> logits [B, h ph, w pw, classes].
    """

    def __init__(self, in_channels: int, patch_size: Pair, classes: int, *, group: Group, rngs: nnx.Rngs):
        self.logits = isotypic.Unpatchify(in_channels, patch_size, classes, group=group, rngs=rngs)
        self.group = group

    def __call__(self, grids: Sequence[Grid], *, key: Key = None, train: bool = False) -> Grid:
        grid = averaged(grids)
        *batch, h, w, channels = grid.values.shape
        field = fields.from_dense(grid.values.reshape(*batch, h * w, channels), self.group)
        return holding(grid, self.logits(field, (h, w)))


class Doubling(nnx.Module):
    """A transposed convolution of stride 2, group norm, GELU.

    Shapes: [B, h, w, in_channels] -> [B, 2 h, 2 w, width].

    Args:
      mode: padding mode of the map.
    """

    def __init__(self, in_channels: int, width: int, *, mode: str, rngs: nnx.Rngs):
        bound = 1 / math.sqrt(16 * width)  # as in PyTorch
        self.kernel = nnx.Param(dense.uniform(rngs.params(), (4, 4, in_channels, width), bound), product=True)
        self.bias = nnx.Param(dense.uniform(rngs.params(), (width,), bound))
        self.scale, self.shift = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.groups, self.mode = math.gcd(width, GROUPS), mode

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, ends = self.kernel[...], ((1, 1), (1, 1))
        with jax.named_scope("linear"):
            x = x.astype(kernel.dtype)
            x = wrap_pad(x, ends) if self.mode == "circular" else jnp.pad(x, [(0, 0), *ends, (0, 0)])
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), [(0, 0), (0, 0)], lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        return dense.gelu(self._normed(y + self.bias[...]))

    def _normed(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            b, h, w, channels = x.shape
            y = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(b, h, w, self.groups, -1)
            mean, variance = (f((1, 2, 4), keepdims=True) for f in (y.mean, y.var))
            y = ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
            return (y * self.scale[...] + self.shift[...]).astype(x.dtype)


def resized(coarse: Grid, fine: Grid, upsampling: str | None) -> jax.Array:
    """The values of `coarse` [B, h, w, C] at the positions of the finer map `fine` [B, H, W, _]: [B, H, W, C].

    Args:
      upsampling: one of UPSAMPLING, around the torus; None: linear interpolation in the plane.
    """
    size = (fine.values.shape[1], fine.values.shape[2])
    if upsampling is None:
        return bilinear(coarse.values, size)
    if upsampling == "unpool":
        values = unpooled(coarse.values, (coarse.stride[0] // fine.stride[0], coarse.stride[1] // fine.stride[1]))
    else:
        values = bilinear(coarse.values, size, circular=True)
    return shifts.roll(values, (coarse.offset - fine.offset) // jnp.array(fine.stride, jnp.int32))


def averaged(grids: Sequence[Grid]) -> Grid:
    """The mean of maps of one size."""
    first, *others = grids
    return holding(first, sum((grid.values for grid in others), first.values) / len(grids)) if others else first


def holding(grid: Grid, values: jax.Array) -> Grid:
    """The grid with new values."""
    return dataclasses.replace(grid, values=values)


def _logits(width: int, classes: int, rngs: nnx.Rngs) -> dense.Linear:
    return dense.Linear(width, classes, init=nnx.initializers.normal(0.01), rngs=rngs)
