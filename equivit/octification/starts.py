"""Octic starts that need no training: what the dense weights determine, projected onto the symmetric subspace.

The dense channels do not know the group, so the octic channels get a basis of their own, and a linear map at the
transition leads back.  This is ours; no paper has it.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical
from equivit.depthwise.equations import Regression, of_map, streamed
from equivit.layers.isotypic import fundamental_domain
from equivit.models.reconfiguration import rebuild
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.model import ViT
from equivit.objectives import feature_matching
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

RIDGE = 1e-4  # of the mean of the diagonal
STARTS = ("projected", "layers", "drawn")


def possible(teacher: ViTConfig) -> tuple[str, ...]:
    """The starts for a teacher: "layers" is for MLPs that all tokens share."""
    return STARTS if teacher.register_mlp is None else tuple(name for name in STARTS if name != "layers")


def octic(teacher: ViT, octic_fields: Mapping[str, Any], start: str, rngs: nnx.Rngs) -> ViT:
    """A model of the octic fields with the teacher's dense blocks; its transition is not fitted yet.

    Args:
      start: "drawn" and "layers": patches and octic blocks are drawn, for `layers.fitted` to replace.  "projected":
        patch kernels span the symmetric parts of the teacher's kernels, and positions are the symmetric part of the
        teacher's in that basis.
    """
    model, _ = rebuild(teacher, rngs=rngs, **octic_fields)
    return put(model, projected(teacher, model)) if start == "projected" else model


def put(model: ViT, tensors: Mapping[str, np.ndarray]) -> ViT:
    """The model with some logical tensors replaced."""
    old = logical.to_logical(model, nnx.Variable)
    new = {name: np.asarray(tensor, old[name].dtype) for name, tensor in tensors.items()}
    changed: Any = logical.from_logical(model, old | new, nnx.Variable)
    return changed


def projected(teacher: ViT, model: ViT) -> dict[str, np.ndarray]:
    """The tensors of the octic patch embedding and positions, by logical name."""
    kernel, _ = (np.asarray(a, np.float64) for a in teacher.patch_embed.affine())  # [ph, pw, in, D]
    basis = symmetric_basis(kernel, model.config.width // OCTIC.order)
    flat = fields.to_dense(fields.Isotypic(*basis)).reshape(-1, model.config.width)
    back = np.linalg.pinv(flat) @ kernel.reshape(len(flat), -1)  # octic channels to the teacher's: [D, D]
    found = {f"patch_embed.{name}": a for name, a in quarters(basis, model.patch_embed.patch_size).items()}
    found["patch_embed.bias"] = np.zeros(model.patch_embed.bias.shape)
    forth = np.linalg.pinv(back)

    def position(grid):
        return jnp.asarray(np.asarray(theirs(grid), np.float64) @ forth, jnp.float32)

    theirs: Any = teacher.position
    ours: Any = model.position
    return found | {f"position.{name}": a for name, a in named(ours.taken(position)).items()}


def symmetric_basis(kernel: np.ndarray, channels: int) -> tuple[Any, Any]:
    """The kernels [ph, pw, in, D] of an octic embedding that span most of dense ones, by principal components.

    The kernels of each irrep are the most energetic orthonormal ones among the symmetric parts of the dense kernels;
    where the patch has fewer, the others are zero.  Returns lines [4, ph, pw, in, C] and planes [2, ph, pw, in, 2C].
    """
    shape = kernel.shape[:-1]
    images: Any = np.moveaxis(kernel, -1, 0)  # a kernel per channel
    turned = {g: fields.act_on_image(g, images) for g in OCTIC.elements}

    def part(entry):  # the part of an irrep's matrix entry
        return sum(entry(g) * turned[g] for g in OCTIC.elements) / OCTIC.order

    def components(rows, number):
        _, sizes, found = np.linalg.svd(rows.reshape(len(rows), -1), full_matrices=False)
        found = found[:number][sizes[:number] > 1e-9 * sizes[0]]
        found = np.pad(found, ((0, number - len(found)), (0, 0)))
        return np.moveaxis(found.reshape(-1, *shape), 0, -1)

    lines = np.stack([components(part(lambda g, i=i: i(g)[0, 0]), channels) for i in OCTIC.lines])
    (plane,) = OCTIC.planes
    first: Any = components(np.concatenate([part(lambda g, j=j: plane(g)[0, j]) for j in (0, 1)]), 2 * channels)
    # A quarter turn maps the first row of E to the second, up to its sign.
    moved: Any = fields.act_on_image("r", np.moveaxis(first, -1, 0))
    return lines, np.stack([first, np.moveaxis(moved, 0, -1) * plane("rrr")[0, 1]])


def quarters(basis: tuple[Any, Any], patch_size: tuple[int, int]) -> dict[str, np.ndarray]:
    """The parameters of `isotypic.PatchEmbed`, by logical name, whose unfolded kernels are the basis."""
    h, w = fundamental_domain(patch_size, OCTIC)
    lines = basis[0][:, :h, :w] / (2 * np.sqrt(2) / 4)  # unfolding adds the equal mirror image
    planes = basis[1][0, :h, :w] / 0.5
    copies = np.stack(np.split(planes, 2, axis=-1))
    return named({"lines": lines, "planes": copies})


def named(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The logical tensors of octic `lines` and `planes`, by name."""
    names = [irrep.name for irrep in OCTIC.lines]
    found = {f"{name}": np.asarray(a) for name, a in zip(names, arrays["lines"], strict=True)}
    return found | {f"E{i + 1}": np.asarray(a) for i, a in enumerate(arrays["planes"])}


class Part(NamedTuple):
    """Sums over images for the patch tokens, or for the tokens before them, of the map at the transition."""

    regression: Regression
    energy: Any  # of the targets
    total: Any  # [N, D], of the targets
    images: Any


def fitted(teacher: ViT, model: ViT, batches: Iterable[np.ndarray], *, orientations: bool) -> tuple[ViT, float]:
    """Fit the linear map of the transition by least squares; also returns the squared error.

    As in the loss, patch tokens and the tokens before them count the same, and errors are relative to the variance over
    images of the teacher's tokens.
    """
    step = functools.partial(_parts, model.config.k, orientations)
    parts: list[Part] = streamed(step, batches, teacher, model)
    variances = [part.energy - np.square(part.total).sum() / part.images for part in parts]
    gram, moment = (
        sum(array / variance for array, variance in zip(arrays, variances, strict=True))
        for arrays in zip(*(part.regression for part in parts), strict=True)
    )
    weight, bias = Regression(gram, moment).solved(RIDGE)
    solution = np.concatenate([weight, bias[None]])
    energy = sum(part.energy / variance for part, variance in zip(parts, variances, strict=True))
    left = energy - 2 * (solution * moment).sum() + (solution * (gram @ solution)).sum()
    tensors = {"transition.projection.weight": weight, "transition.projection.bias": bias}
    return put(model, tensors), float(left / len(parts))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _parts(k, orientations, teacher, model, images, weight):
    wanted = feature_matching.targets(teacher, images, "transition", k, orientations)
    found = model.transition.invariant(model.fields(images, (k - 1,))[k - 1]).astype(jnp.float32)
    rows = jnp.broadcast_to(weight[:, None], found.shape[:-1])
    wanted, parts = wanted * rows[..., None], []
    for part in feature_matching.parts(model.config.prefix):
        x, y, r = found[:, part], wanted[:, part], rows[:, part]
        parts.append(Part(of_map(x, y, r), jnp.square(y).sum(), y.sum(0), weight.sum()))
    return parts
