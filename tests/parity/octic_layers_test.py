"""Octic layers against the official ones: one test for each file."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, testing
from equivit.layers import dense, invariants, isotypic
from equivit.layers.position import IsotypicPosition
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, octic_vits
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC
from tests.parity.arrays import COMPONENTS, Comparison, below, field, files, fill, images, load, run

WIDTH, HEADS = 64, 4
CONFIG = ViTConfig(
    width=WIDTH, depth=2, num_heads=HEADS, family="H8", patch_size=8, image_size=(16, 16), num_classes=10
)  # fmt: skip


def block_pairs(flavour="deit", index=0):
    return below(octic_vits.table(CONFIG, flavour).pairs, f"blocks.{index}.", f"blocks.{index}.")


def linear(c, data, name):
    layer = fill(
        lambda: isotypic.Linear(WIDTH, 96, group=OCTIC, bias="nobias" not in name, rngs=nnx.Rngs(0)),
        data,
        below(block_pairs(), "attn.proj.", "attention.proj."),
    )
    c.field("output/", run(layer, field(data, "input/")))


def affine(c, data, name):
    # No layer of ours by itself: the end of a norm, a layer scale and then a bias on the invariant part.
    pairs = [pair for pair in below(block_pairs(), "norm1.scaling.", "norm1.") if pair.theirs != ("beta",)]
    bias = data.pop("param/beta")
    scale = fill(lambda: isotypic.LayerScale(WIDTH, 1.0, group=OCTIC), data, pairs)
    y = run(scale, field(data, "input/"))
    c.field("output/", Isotypic(y.lines.at[0].add(bias), y.planes))


def layernorm(c, data, name):
    eps = {"layernorm": 1e-5, "layernorm_bigeps": 0.5, "layernorm_eps1e-6": 1e-6}[name]
    norm = fill(lambda: isotypic.LayerNorm(WIDTH, group=OCTIC, eps=eps), data, below(block_pairs(), "norm1.", "norm1."))
    c.field("output/", run(norm, field(data, "input/")))


def layerscale(c, data, name):
    scale = fill(
        lambda: isotypic.LayerScale(WIDTH, 1.0, group=OCTIC), data, below(block_pairs(), "gamma_1.", "scale1.")
    )
    c.field("output/", run(scale, field(data, "input/")))


def gelu(c, data, name):
    y, pullback = jax.vjp(jax.jit(isotypic.gelu), field(data, "input/"))
    c.field("output/", y)
    c.field("grad/", pullback(field(data, "input/cotangent/"))[0])


def mlp(c, data, name):
    layer = fill(
        lambda: isotypic.Mlp(WIDTH, 4 * WIDTH, group=OCTIC, rngs=nnx.Rngs(0)),
        data,
        below(block_pairs(), "mlp.", "mlp."),
    )
    c.field("output/", run(layer, field(data, "input/")))


def attention(c, data, name):
    heads, bias = (2, False) if "2heads" in name else (HEADS, True)
    layer = fill(
        lambda: isotypic.Attention(WIDTH, heads, group=OCTIC, qkv_bias=bias, rngs=nnx.Rngs(0)),
        data,
        below(block_pairs(), "attn.", "attention."),
    )
    c.field("output/", run(layer, field(data, "input/")))


def block(c, data, name):
    layer = fill(lambda: CONFIG.build(nnx.Rngs(0)).blocks[0], data, block_pairs(name.split("_")[1]))
    c.field("output/", run(layer, field(data, "input/")))


def std_block(c, data, name):
    layer = fill(lambda: CONFIG.build(nnx.Rngs(0)).blocks[1], data, block_pairs(name.split("_")[2], index=1))
    c.array("output/x", run(layer, jnp.asarray(data["input/x"])))


def patch_embed(c, data, name):
    side = data["output/kernel/A1"].shape[-1]
    pairs = below(octic_vits.table(CONFIG, "deit").pairs, "patch_embed.", "patch_embed.")
    layer = fill(lambda: isotypic.PatchEmbed((side, side), 3, WIDTH, group=OCTIC, rngs=nnx.Rngs(0)), data, pairs)
    c.field("output/", run(layer, images(data)))
    kernels = fields.to_components(jax.jit(lambda layer: layer.kernels())(layer)).transpose(
        0, 4, 3, 1, 2
    )  # [8, out, in, P, P]
    for kernel, key in zip((*range(4), 4, 6), ("A1", "A2", "B1", "B2", "E_left", "E_right"), strict=True):
        c.array(f"output/kernel/{key}", kernels[kernel])


def pos_embed(c, data, name):
    pairs = octic_vits.table(CONFIG, "deit").pairs
    layer = fill(
        lambda: IsotypicPosition((14, 14), WIDTH, group=OCTIC, std=1.0, rngs=nnx.Rngs(0)),
        data,
        [p for p in below(pairs, "", "position.") if p.theirs[0].startswith("pos_embed")],
    )
    for key, grid in dict(unfolded=(14, 14), interp_6x6=(6, 6), interp_20x20=(20, 20), interp_8x22=(8, 22)).items():
        table = jax.jit(lambda layer, grid=grid: layer(grid))(layer)
        table = jax.tree.map(lambda leaf, grid=grid: leaf.reshape(len(leaf), *grid, -1), table)
        c.field(f"output/{key}/", table)
        if key == "unfolded":
            c.field("output/unfolded5/", table)


def isotypic_to(c, data, name):
    side, channels = (8, 3) if name == "isotypic_to_image" else (6, 5)
    pairs = [
        dataclasses.replace(pair, theirs=(f"lin8.{pair.theirs[0]}",), ours=(f"linear.{pair.ours[0]}",))
        for pair in below(block_pairs(), "attn.proj.", "attention.proj.")
    ]

    def make():
        return isotypic.Unpatchify(WIDTH, (side, side), channels, group=OCTIC, copies=2, rngs=nnx.Rngs(0))

    layer = fill(make, data, pairs)
    y = jax.jit(lambda layer, x: layer(x, (4, 4)))(layer, field(data, "input/"))
    if name == "isotypic_to_image":
        c.array("output/image", y.transpose(0, 3, 1, 2))
    else:
        c.array("output/patches", dense.patchify(y, (side, side)))


def inv_abs_all_noninvariant(c, data, name):
    # The absolute value of every component, which is not an invariant: a quarter turn swaps the rows of E.
    x = field(data, "input/")
    c.array("output/x", jnp.abs(fields.to_dense(x)))
    with pytest.raises(AssertionError):
        testing.assert_equivariant(lambda x: jnp.abs(fields.to_dense(x)).mean(-2), OCTIC, x, "field", grid=(3, 3))


def inv(c, data, name):
    x, kind = field(data, "input/"), name.removeprefix("inv_").removesuffix("_pooled").replace("canoniz", "canonis")
    config = dataclasses.replace(CONFIG, family="I8", invariant=kind)
    table = octic_vits.table(config, "deit")
    for constant in table.constants:
        if constant.name.startswith("invariantization."):
            np.testing.assert_array_equal(data.pop("param/" + constant.name.split(".")[1]), constant.value)
    if kind == "max_filtering":  # one file has fewer references than the models
        number = len(data["param/references"])
        make = functools.partial(invariants.MaxFiltering, references=number)
    else:
        make = functools.partial(invariants.create, kind)
    layer = fill(
        lambda: make(WIDTH, group=OCTIC, rngs=nnx.Rngs(0)),
        data,
        below(table.pairs, "invariantization.", "transition.invariant."),
    )
    c.array("output/x", run(layer, x))


def invariant_head(c, data, name):
    norm = "norm" in name
    make = lambda: dense.MlpHead(48, WIDTH, 10, norm=norm, rngs=nnx.Rngs(0))  # noqa: E731
    names = jax.eval_shape(lambda: logical.to_logical(make()))
    head = fill(make, data, mapping.pairs(names, {"norm": "0", "fc1": "1", "fc2": "3"}))
    c.array("output/logits", run(head, jnp.asarray(data["input/x"])))


def fourier(c, data, name):
    x = field(data, "input/")
    for i, values in enumerate(fields.to_regular(x)):
        c.array(f"output/to_regular/{i}", values)
    c.field("output/to_isotypic_of_input/", fields.from_regular(fields.to_components(x)))
    c.field("output/packed5/", x)


def group_action(c, data, name):
    x = field(data, "input/")
    values = jnp.stack([data[f"input/{component}"] for component in COMPONENTS])
    for g in OCTIC.elements:
        c.field(f"output/isotypic/{g}/", fields.act_on_channels(g, x))
        c.field(f"output/tokens_isotypic/{g}/", fields.act(g, x, (4, 4)))
        for i, moved in enumerate(jnp.einsum("rs,s...->r...", OCTIC.regular(g).astype(np.float32), values)):
            c.array(f"output/regular/{g}/{i}", moved)
        c.array(f"output/image/{g}", fields.act_on_image(g, images(data)).transpose(0, 3, 1, 2))


CASES = [linear, affine, layernorm, layerscale, gelu, mlp, attention, block, std_block, patch_embed, pos_embed]
CASES += [
    isotypic_to,
    invariant_head,
    inv_abs_all_noninvariant,
    inv,
    fourier,
    group_action,
]  # of two that fit a file's name the first counts
FILES = [path for path in files("octic") if not path.stem.startswith("model")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_layer(path, record_property):
    data = load(path)
    comparison = Comparison(data)
    case = next(case for case in CASES if path.stem.startswith(case.__name__))
    case(comparison, data, path.stem)
    comparison.finish(record_property, "octic layers")
