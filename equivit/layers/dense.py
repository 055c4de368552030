"""The layers of a plain transformer.  `isotypic.py` has layers of the same names for fields.

Batch, tokens and channels are the last three axes; there may be any number of batch axes.  A linear map computes in the
dtype of its weight (`equivit/precision.py`); normalisation and softmax compute in at least float32.  `equivit/costs.py`
groups costs by the named scopes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from equivit import errors
from equivit.kernels.attention import attend, self_attention, side_by_side, split_heads, weights
from equivit.kernels.gelu import gelu
from equivit.kernels.product import Map, linear
from equivit.layers.grid import Layout, check_images

# The official codes truncate this normal at +-2, which is 100 standard deviations and has no effect.
WEIGHT_INIT = nnx.initializers.normal(0.02)


def xavier_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any = float) -> jax.Array:
    """Xavier's uniform for maps [..., in, out]; leading axes hold maps of their own, such as one for each irrep."""
    return nnx.initializers.xavier_uniform(batch_axis=tuple(range(len(shape) - 2)))(key, shape, dtype)


# Weight initialisers by their name in model configurations.
INITS = {
    "normal": WEIGHT_INIT,
    "truncated_normal": nnx.initializers.truncated_normal(0.02),  # cut at 2 deviations, which scales it by 0.88
    "xavier_uniform": xavier_uniform,
}


# For cheap functions: the backward pass recomputes from the arguments.  Otherwise JAX stores the intermediate values,
# for a GELU three arrays as large as the hidden field, which a scan over blocks writes and reads.
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


class Linear(nnx.Module):
    """y = x W + b, in the dtype of W.

    Shapes: [*B, N, in_features] -> [*B, N, out_features].

    Args:
      init: draws W; b starts at 0.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, init: Initializer = WEIGHT_INIT, rngs: nnx.Rngs
    ):
        self.weight = nnx.Param(init(rngs.params(), (in_features, out_features)), product=True)
        self.bias: Any = nnx.Param(jnp.zeros(out_features)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])

    def map(self) -> Map:
        """The weight and the bias."""
        return self.weight[...], None if self.bias is None else self.bias[...]

    def arrays(self) -> tuple[tuple[jax.Array], jax.Array | None]:
        """The weights, one array per leaf of a field (here one), and the bias."""
        weight, bias = self.map()
        return (weight,), bias

    def holding(self, weights: tuple[jax.Array], bias: jax.Array | None) -> "Linear":
        """A copy of the map with these arrays."""
        copy = jax.tree.map(lambda a: a, self)
        copy.weight, copy.bias = self.weight.replace(weights[0]), None if bias is None else nnx.data(nnx.Param(bias))
        return copy


class LayerNorm(nnx.Module):
    """Normalises each token to mean 0 and variance 1 over its channels; then applies scale and bias.

    Shapes: [*B, N, C] -> the same.
    """

    def __init__(self, width: int, *, eps: float = 1e-6, rngs: nnx.Rngs | None = None):
        self.scale = nnx.Param(jnp.ones(width), norm=True)
        self.bias = nnx.Param(jnp.zeros(width), norm=True)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normalised(self.eps, x, (self.scale[...], self.bias[...]))

    @property
    def scales(self) -> tuple[jax.Array]:
        """The scale, in a tuple."""
        return (self.scale[...],)

    @property
    def standardise(self) -> "Standardise":
        """The norm without scale and bias."""
        return Standardise(self.eps)


@functools.partial(recomputed, static_argnums=0)
def _normalised(eps: float, x: jax.Array, vectors: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
    with jax.named_scope("norm"):
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else y.dtype
        return (y if vectors is None else y * vectors[0] + vectors[1]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Standardise:
    """A layer norm without scale and bias.  Shapes: [*B, N, C] -> the same."""

    eps: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normalised(self.eps, x)

    def fork(self, x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """x, and the standardised tokens in a dtype."""
        return x, self(x).astype(dtype)


class LayerScale(nnx.Module):
    """A learned factor per channel, small at initialisation.  Shapes: [*B, N, C] -> the same."""

    def __init__(self, width: int, init: float, *, rngs: nnx.Rngs | None = None):
        self.scale = nnx.Param(jnp.full(width, init, float))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...]

    @property
    def scales(self) -> tuple[jax.Array]:
        """The scale, in a tuple."""
        return (self.scale[...],)


@recomputed
def gelu_tanh(x: jax.Array) -> jax.Array:
    """The tanh approximation of the GELU, Flax's default, in at least float32; its error is up to 5e-4."""
    with jax.named_scope("activation"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # in float16 its cubes overflow above 40
        return jax.nn.gelu(wide, approximate=True).astype(x.dtype)


@recomputed
def quick_gelu(x: jax.Array) -> jax.Array:
    """x sigmoid(1.702 x), the GELU of CLIP and CvT; its error is up to 2e-2."""
    with jax.named_scope("activation"):
        return x * jax.nn.sigmoid(1.702 * x)


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0)."""
    with jax.named_scope("activation"):
        return jax.nn.relu(x)


@recomputed
def hard_swish(x: jax.Array) -> jax.Array:
    """x min(max(x + 3, 0), 6) / 6."""
    with jax.named_scope("activation"):
        return jax.nn.hard_swish(x)


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu}


class Mlp(nnx.Module):
    """Linear, GELU, linear.  Shapes: [*B, N, width] -> [*B, N, out], through [*B, N, hidden].

    Args:
      out: None for `width`.
    """

    MAPS = "fc1", "fc2"  # the first and the last

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        out: int | None = None,
        activation: Callable = gelu,
        init: Initializer = WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        self.fc1 = Linear(width, hidden, init=init, rngs=rngs)
        self.fc2 = Linear(hidden, width if out is None else out, init=init, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        return self.fc2(self.activation(self.fc1(x)))


class SwiGlu(nnx.Module):
    """fc2(silu(a) * b) with (a, b) = fc1(x): the gated MLP of DINOv2's giant (Shazeer 2020).

    Shapes: [*B, N, width] -> the same, through [*B, N, 2 hidden] and [*B, N, hidden].
    """

    MAPS = "fc1", "fc2"  # the first and the last

    def __init__(self, width: int, hidden: int, *, init: Initializer = WEIGHT_INIT, rngs: nnx.Rngs):
        self.fc1 = Linear(width, 2 * hidden, init=init, rngs=rngs)
        self.fc2 = Linear(hidden, width, init=init, rngs=rngs)

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        gate, value = jnp.split(self.fc1(x), 2, axis=-1)
        with jax.named_scope("activation"):
            hidden = jax.nn.silu(gate) * value
        return self.fc2(hidden)


class Attention(nnx.Module):
    """Multi-head self-attention.  The columns of `qkv` are ordered (q | k | v) x heads x head channels.

    Shapes: [*B, N, in_features] -> [*B, N, width].

    Args:
      in_features: None for `width`.

    Raises:
      ValueError: `num_heads` does not divide `width`.
    """

    MAPS: tuple[str, str] | None = ("qkv", "proj")  # the first and the last

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        in_features: int | None = None,
        qkv_bias: bool = True,
        init: Initializer = WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        errors.divides("Attention: num_heads", num_heads, width, f"{width=}")
        in_features = width if in_features is None else in_features
        self.qkv = Linear(in_features, 3 * width, bias=qkv_bias, init=init, rngs=rngs)
        self.proj = Linear(width, width, init=init, rngs=rngs)
        self.num_heads = num_heads

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        return self_attention(x, self.qkv.map(), self.proj.map(), self.num_heads)

    def weights(self, x: jax.Array, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """The attention weights [*B, num_heads, rows, N] of the first `rows` tokens; None: of all tokens."""
        q, k, _ = self.heads(x)
        return weights(q[..., :rows, :], k)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v, each [*B, num_heads, N, head channels]."""
        return split_heads(self.qkv(x), self.num_heads)

    def projected(self, y: jax.Array) -> jax.Array:
        """The output projection of weighted sums of values [*B, num_heads, N, head channels]."""
        return self.proj(side_by_side(y))


class NormedAttention(Attention):
    """Self-attention with a layer norm of the queries and of the keys of each head (arXiv 2302.05442, Section 2).

    Args:
      eps: of these norms.
      options: arguments of `Attention`.
    """

    def __init__(self, width: int, num_heads: int, *, eps: float, **options: Any):
        super().__init__(width, num_heads, **options)
        self.q_norm, self.k_norm = (LayerNorm(width // num_heads, eps=eps) for _ in range(2))

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        return self.projected(attend(*self.heads(x)))

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class PatchEmbed(nnx.Module):
    """A linear map of each patch: a convolution whose stride equals its kernel size.

    The product has the dtype of the kernel; the sum, and so the residual stream, has the dtype of the bias, or at least
    float32 without a bias.

    Shapes: [*B, H, W, in_channels] -> [*B, (H/ph) (W/pw), width], tokens in row-major order.

    Args:
      bias: whether there is one.
      init: draws the kernel as a matrix [ph pw in_channels, width]; None: PyTorch's uniform for convolutions, which the
        bias always uses.

    Raises:
      ValueError: images that `grid.check_images` refuses.
    """

    def __init__(
        self,
        patch_size: tuple[int, int],
        in_channels: int,
        width: int,
        *,
        bias: bool = True,
        init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        shape = (patch_size[0] * patch_size[1] * in_channels, width)
        bound = 1 / math.sqrt(shape[0])
        kernel = uniform(rngs.params(), shape, bound) if init is None else init(rngs.params(), shape)
        self.kernel = nnx.Param(kernel.reshape(*patch_size, in_channels, width), product=True)
        self.bias = nnx.Param(uniform(rngs.params(), (width,), bound)) if bias else None
        self.patch_size = patch_size

    def __call__(self, images: jax.Array) -> jax.Array:
        with jax.named_scope("linear"):
            kernel = self.kernel[...]
            check_images(images, kernel.shape[-2], self.patch_size)
            patches = patchify(images, self.patch_size).astype(kernel.dtype)
            kernel = kernel.reshape(-1, kernel.shape[-1])
            if self.bias is None:
                wide = jnp.promote_types(kernel.dtype, jnp.float32)
                return jnp.matmul(patches, kernel, preferred_element_type=wide)
            return linear(patches, kernel) + self.bias[...]

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The kernel [ph, pw, in, width] and the bias [width], zeros if there is none."""
        kernel = self.kernel[...]
        return kernel, jnp.zeros(kernel.shape[-1:]) if self.bias is None else self.bias[...]

    def filters(self) -> dict[str, jax.Array]:
        """The kernels [ph, pw, in, width] by feature type: one type, "all"."""
        return {"all": self.kernel[...]}


def uniform(key: jax.Array, shape: tuple[int, ...], bound: float) -> jax.Array:
    """Uniform in [-bound, bound]: the initialisation of convolutions, with bound = 1 / sqrt(fan-in)."""
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def patchify(images: jax.Array, patch_size: tuple[int, int]) -> jax.Array:
    """Split images into patches.  Shapes: [*B, H, W, C] -> [*B, N, ph pw C], patches and pixels in row-major order."""
    *batch, height, width, channels = images.shape
    ph, pw = patch_size
    x = images.reshape(*batch, height // ph, ph, width // pw, pw, channels)
    return jnp.swapaxes(x, -3, -4).reshape(*batch, (height // ph) * (width // pw), ph * pw * channels)


def unpatchify(patches: jax.Array, grid: tuple[int, int], patch_size: tuple[int, int]) -> jax.Array:
    """The inverse of `patchify` for a grid (h, w) of patches: [*B, N, ph pw C] -> [*B, H, W, C]."""
    *batch, _, size = patches.shape
    (h, w), (ph, pw) = grid, patch_size
    x = patches.reshape(*batch, h, w, ph, pw, size // (ph * pw))
    return jnp.swapaxes(x, -3, -4).reshape(*batch, h * ph, w * pw, size // (ph * pw))


class MlpHead(nnx.Module):
    """Optional layer norm, linear, GELU, linear; the classifier after an invariantization (octic ViTs, Appendix C).

    Shapes: [*B, in_features] -> [*B, num_classes].

    Args:
      init: draws the weight of the last map.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        *,
        norm: bool = False,
        init: Initializer = WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        self.norm = LayerNorm(in_features) if norm else None
        self.fc1 = Linear(in_features, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, num_classes, init=init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.norm is None else self.norm(x)
        return self.fc2(gelu(self.fc1(x)))
