"""An octic start by least squares, layer by layer: each octic layer is fitted to the teacher's layer at its place.

The teacher's tokens for the eight orientations of an image, moved back, are values on the group, and so a field of
eight times the teacher's width.  Principal components of each irrep reduce it to the width of the octic model: one
basis for the tokens between blocks, and one for the queries and keys, and the values, of each head.  An eighth of an
MLP's hidden units keep all their values.  These fields are the targets of the linear layers, fitted in order: each
layer's inputs are computed by the fitted layers before it.  Norms keep their initial scales.  This is ours.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical
from equivit.depthwise.equations import Regression, bare, of_map, streamed
from equivit.layers import isotypic
from equivit.layers.grid import Layout
from equivit.models.vit.model import ViT
from equivit.objectives import feature_matching
from equivit.octification import starts
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC

LAYERS = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
_product = functools.partial(jnp.einsum, precision="highest")


class Basis(NamedTuple):
    """An equivariant map from lifted channels D to fewer: lines [4, *H, D, C] and planes [*H, 2D, 2C].

    H are axes of the field between its tokens and its channels, such as heads.
    """

    lines: Any
    planes: Any

    def __call__(self, x: Isotypic) -> Isotypic:
        """The field in the basis: D -> C channels."""
        lines = _product("ibn...d,i...dc->ibn...c", x.lines, self.lines)
        return Isotypic(lines, _product("ibn...d,...dc->ibn...c", x.planes, self.planes))


class Bases(NamedTuple):
    """The bases of the tokens, and by block of the queries and keys, of the values, and the chosen hidden units."""

    tokens: Basis
    queries: list[Basis]
    values: list[Basis]
    units: list[np.ndarray]


def fitted(teacher: ViT, model: ViT, batches: Iterable[np.ndarray]) -> ViT:
    """The model with its embedding and octic blocks fitted to the teacher's; its transition is not fitted yet.

    The teacher needs MLPs of two layers, shared by all tokens.
    """
    bases = _bases(teacher, model, batches)
    model = starts.put(model, embedding(teacher, model, bases.tokens) | _ones(model))
    for block in range(model.config.k):
        for layer in LAYERS:
            step = functools.partial(_equations, block, layer)
            model = starts.put(model, _solved(model, block, layer, streamed(step, batches, bases, teacher, model)))
    return model


def lifted(values: jax.Array) -> Isotypic:
    """Values on the group as a field: [8, *B, N, D], of the images turned by the inverse elements and moved back."""
    return fields.from_regular(values)


def moved_back(tokens: Any, images: jax.Array, patch_size: tuple[int, int], prefix: int) -> jax.Array:
    """`tokens(image)` for the images turned by the inverse of each element, moved back: [8, *B, N, D]."""
    found = []
    for g in OCTIC.regular_order:
        turned = fields.act_on_image(OCTIC.inverse(g), images)
        grid = turned.shape[-3] // patch_size[0], turned.shape[-2] // patch_size[1]
        found.append(fields.act_on_tokens(g, tokens(turned), grid, prefix))
    return jnp.stack(found)


def embedding(teacher: ViT, model: ViT, basis: Basis) -> dict[str, np.ndarray]:
    """The tensors of the octic embedding, by logical name: the teacher's in the basis."""
    size, channels = model.config.patch_size, model.config.in_channels
    pixels = np.eye(size[0] * size[1] * channels, dtype=np.float32).reshape(-1, *size, channels)
    images = jnp.concatenate([jnp.zeros_like(pixels[:1]), pixels])
    patches = basis(lifted(moved_back(teacher.patch_embed, images, size, 0)))
    kernels = jax.tree.map(lambda a: np.asarray(a[:, 1:, 0] - a[:, :1, 0], np.float64), patches)
    shaped = [a.reshape(len(a), *size, channels, -1) for a in (kernels.lines, kernels.planes)]
    quarters = starts.quarters((shaped[0], shaped[1]), model.patch_embed.patch_size)
    found = {f"patch_embed.{name}": a for name, a in quarters.items()}
    found["patch_embed.bias"] = np.asarray(patches.lines[0, 0, 0])

    def position(grid):
        table = jnp.asarray(theirs(grid))
        values = jnp.stack([fields.act_on_tokens(g, table, grid) for g in OCTIC.regular_order])
        return fields.to_dense(basis(lifted(values[:, None])))[0]

    theirs: Any = teacher.position
    ours: Any = model.position
    found |= {f"position.{name}": a for name, a in starts.named(ours.taken(position)).items()}
    return found | _prefix(teacher, basis)


def _prefix(teacher: ViT, basis: Basis) -> dict[str, np.ndarray]:
    """The learned tokens before the patches: of fields they have only the invariant part."""
    found = {}
    for name in ("class_token", "class_position", "registers"):
        token = getattr(teacher.prefix, name, None)
        if token is not None:
            rows = jnp.atleast_2d(token[...])
            values = jnp.broadcast_to(rows, (OCTIC.order, 1, *rows.shape))
            found[f"prefix.{name}"] = np.asarray(basis(lifted(values)).lines[0, 0]).reshape(*token.shape[:-1], -1)
    return found


# ---- Bases


def _bases(teacher: ViT, model: ViT, batches: Iterable[np.ndarray]) -> Bases:
    """Principal components on all images."""
    k, channels = model.config.k, model.config.width // OCTIC.order
    places, heads = streamed(functools.partial(_moments, k), batches, teacher)
    energies = [place.lines.trace(axis1=-2, axis2=-1).sum() + place.planes.trace() for place in places]
    tokens = _principal(_relative(places, energies), channels)
    each = channels // model.config.num_heads
    queries = [jax.tree.map(lambda a: a / OCTIC.order**0.5, _principal(block[0], each)) for block in heads]
    values = [_principal(block[1], each) for block in heads]
    hidden = model.blocks[0].mlp.fc1.bias[...].shape[0]
    units = [np.sort(np.argsort(-block[2], kind="stable")[:hidden]) for block in heads]
    return Bases(tokens, queries, values, units)


def _relative(trees: Sequence[Any], energies: Sequence[Any]) -> Any:
    """The sum of the trees, each divided by its energy."""
    return jax.tree.map(lambda *a: sum(b / energy for b, energy in zip(a, energies, strict=True)), *trees)


def _principal(moments: Basis, channels: int) -> Basis:
    """The orthonormal directions of most energy, from second moments [..., D, D]."""
    lines, planes = (np.linalg.eigh(part)[1][..., ::-1] for part in moments)
    found = Basis(lines[..., :channels], planes[..., : 2 * channels])
    return jax.tree.map(lambda a: np.asarray(a, np.float32), found)


@functools.partial(jax.jit, static_argnums=0)
def _moments(k, teacher, images, weight):
    """Second moments of the tokens before and after each of k blocks; and by block of heads, and energies of units."""
    x, layout = turned_tokens(teacher, images)
    weight = weight[:, None] * _shares(x.shape[-2], teacher.config.prefix)
    places, heads = [_second(lifted(x), weight)], []
    for index in range(k):
        block = teacher.blocks[index]
        q, key, v = _heads(block, x)
        joint = jax.tree.map(jnp.add, *(_second(_normed(lifted(a)), weight) for a in (q, key)))
        _, hidden, x = _through(block, x, layout)
        energies = (jnp.square(jax.nn.gelu(hidden)) * weight[..., None]).sum((0, 1, 2))
        energies *= jnp.square(block.mlp.fc2.weight[...]).sum(-1)
        heads.append((joint, _second(lifted(v), weight), energies))
        places.append(_second(lifted(x), weight))
    return places, heads


def _shares(number: int, prefix: int) -> np.ndarray:
    """The weights of tokens for which, as in the loss, patches and the tokens before them count the same."""
    found = np.empty(number, np.float32)
    for part in feature_matching.parts(prefix):
        found[part] = 1 / len(found[part])
    return found


def _normed(x: Any) -> Isotypic:
    """The field divided by the root mean square of each head."""
    mean = jnp.square(x.lines).mean((0, 1, 2, -1)) + jnp.square(x.planes).mean((0, 1, 2, -1))
    return jax.tree.map(lambda a: a * jax.lax.rsqrt(mean)[..., None], x)


def _second(x: Isotypic, weight: jax.Array) -> Basis:
    """Sums of products of channels, over tokens with weights [B, N] and rows of E."""
    parts = [(a, a * weight.reshape(*weight.shape, *(1,) * (a.ndim - 3))) for a in jax.tree.leaves(x)]
    return Basis(_product("ibn...d,ibn...e->i...de", *parts[0]), _product("ibn...d,ibn...e->...de", *parts[1]))


# ---- The teacher on all orientations


def turned_tokens(teacher: ViT, images: jax.Array) -> tuple[jax.Array, Layout]:
    """The input of the first block, by orientation: [8, B, N, D]."""
    config = teacher.config
    found = moved_back(lambda turned: teacher.embed(turned)[0], images, config.patch_size, config.prefix)
    return found.astype(jnp.float32), teacher.embed(images)[1]


def _through(block: Any, x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens after attention, the hidden units, and the tokens after the block."""
    attention, mlp = block.branches()
    x = x + attention(x, layout)
    return x, block.mlp.fc1(block.norm2(x)), x + mlp(x, layout)


def _heads(block: Any, x: jax.Array) -> list[jax.Array]:
    """Queries, keys and values by head: [8, B, N, heads, channels] each."""
    found = block.attention.qkv(block.norm1(x))
    found = found.reshape(*found.shape[:-1], 3, block.attention.num_heads, -1)
    return [found[..., part, :, :] for part in range(3)]


# ---- Least squares


@functools.partial(jax.jit, static_argnums=(0, 1))
def _equations(index, layer, bases, teacher, model, images, weight):
    """The equations of a linear layer of a block, for patches and for the tokens before them."""
    x, layout = turned_tokens(teacher, images)
    for before in range(index):
        x = _through(teacher.blocks[before], x, layout)[2]
    found, wanted = _pair(layer, index, bases, teacher.blocks[index], x, model, images)
    return [_part(found[:, part], wanted[:, part], weight) for part in feature_matching.parts(model.config.prefix)]


def _part(found: Any, wanted: Any, weight: jax.Array) -> tuple[list[Regression], jax.Array]:
    """The equations of each irrep, and the squares of the targets, for some of the tokens."""
    rows = jnp.broadcast_to(weight[:, None], found.lines.shape[1:-1])
    wanted = jax.tree.map(lambda a: a * rows[..., None], wanted)
    lines = [of_map(*pair, rows) for pair in zip(found.lines, wanted.lines, strict=True)]
    planes = of_map(found.planes, wanted.planes, jnp.broadcast_to(rows, found.planes.shape[:-1]))
    return [*lines, planes], jnp.square(wanted.lines).sum() + jnp.square(wanted.planes).sum()


def _pair(layer, index, bases, teacher, x, model, images) -> tuple[Isotypic, Isotypic]:
    """The inputs and the targets of a layer, for the teacher's block and its input tokens x."""
    s, layout = model.embed(images)
    s, _ = model.trunk(s, layout, stop=index) if index else (s, None)
    block = model.blocks[index]
    attention, mlp = block.branches()
    after_attention, hidden, after = _through(teacher, x, layout)
    if layer == "attention.qkv":
        q, key, v = _heads(teacher, x)
        parts = [bases.queries[index](lifted(a)) for a in (q, key)] + [bases.values[index](lifted(v))]
        joined = jax.tree.map(lambda *a: jnp.stack(a, -3).reshape(*a[0].shape[:-2], -1), *parts)
        return block.norm1(s), joined
    if layer == "attention.proj":
        return bare(block.attention)(block.norm1(s), layout), bases.tokens(lifted(after_attention)) - s
    s = s + attention(s, layout)
    if layer == "mlp.fc1":
        return block.norm2(s), lifted(hidden[..., bases.units[index]])
    return isotypic.gelu(block.mlp.fc1(block.norm2(s))), bases.tokens(lifted(after)) - s


def _solved(model: ViT, block: int, layer: str, parts: Any) -> dict[str, np.ndarray]:
    """The tensors of a layer, by logical name; the invariant part alone has a bias, if any.

    As in the loss, patches and the tokens before them count the same.
    """
    equations = _relative(*zip(*parts, strict=True))
    body, name = layer.split(".")
    has_bias = getattr(getattr(model.blocks[block], body), name).bias is not None
    solutions = [_without_bias(one) if i or not has_bias else one for i, one in enumerate(equations)]
    weights, biases = zip(*(one.solved(starts.RIDGE) for one in solutions), strict=True)
    names = [irrep.name for irrep in OCTIC.irreps]
    found = dict(zip(names, weights, strict=True)) | ({"bias": biases[0]} if has_bias else {})
    return {f"blocks.{block}.{layer}.{key}": a for key, a in found.items()}


def _without_bias(equations: Regression) -> Regression:
    """The equations whose solution has the bias 0."""
    gram, moment = (np.array(a, np.float64) for a in equations)
    gram[-1], gram[:, -1], moment[-1] = 0, 0, 0
    gram[-1, -1] = 1
    return Regression(gram, moment)


def _ones(model: ViT) -> dict[str, np.ndarray]:
    """The layer scales of the octic blocks, all 1: the fitted layers absorb the teacher's."""
    old = logical.to_logical(model, nnx.Variable)
    octic = tuple(f"blocks.{block}.scale" for block in range(model.config.k))
    return {name: np.ones(a.shape) for name, a in old.items() if name.startswith(octic)}
