"""Flip layers against the official ones: one test for each file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.layers import isotypic
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import flip
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import FLIP
from tests.parity.arrays import TOLERANCE, Comparison, below, field, files, fill, images, load, run

WIDTH, HEADS = 48, 4
CONFIG = ViTConfig(
    width=WIDTH,
    depth=2,
    num_heads=HEADS,
    family="H2",
    patch_size=8,
    image_size=(16, 16),
    num_classes=10,
    isotypic_eps=1e-6,
)


def block_pairs(index=0):
    return below(flip.table(CONFIG, "deit").pairs, f"blocks.{index}.", f"blocks.{index}.")


def official_order(x: Isotypic, grid) -> Isotypic:
    """Patch tokens row by row to the official order."""
    return jax.tree.map(lambda leaf: leaf[..., flip.token_order(grid), :], x)


def flatten(c, data, name):
    tokens = jnp.asarray(data["input/map"])  # [B, C, h, w]
    grid = tokens.shape[-2:]
    np.testing.assert_array_equal(data["param/permutation"], flip.token_order(grid))
    for key, array in (("tokens", tokens), ("tokens_of_flipped_map", tokens[..., ::-1])):
        rows = array.reshape(*array.shape[:2], -1).swapaxes(1, 2)
        c.array(f"output/{key}", rows[:, flip.token_order(grid)])


def linear(c, data, name):
    layer = fill(
        lambda: isotypic.Linear(WIDTH, 72, group=FLIP, bias="nobias" not in name, rngs=nnx.Rngs(0)),
        data,
        below(block_pairs(), "attn.proj.", "attention.proj."),
    )
    c.field("output/", run(layer, field(data, "input/")))


def affine(c, data, name):
    # No layer of ours by itself: the end of a norm, a layer scale and then a bias on the symmetric half.
    pairs = [pair for pair in below(block_pairs(), "norm1.scaling.", "norm1.") if pair.theirs != ("beta",)]
    bias = data.pop("param/beta")
    scale = fill(lambda: isotypic.LayerScale(WIDTH, 1.0, group=FLIP), data, pairs)
    c.field("output/", Isotypic(run(scale, field(data, "input/")).lines.at[0].add(bias), None))


def layerscale(c, data, name):
    scale = fill(lambda: isotypic.LayerScale(WIDTH, 1.0, group=FLIP), data, below(block_pairs(), "gamma_1.", "scale1."))
    c.field("output/", run(scale, field(data, "input/")))


def layernorm_separate(c, data, name):
    # An older norm with statistics of its own for each half; no published model has it, so we have no such layer.  Its
    # formula is written out here, and ours with the same parameters is shown to be another.
    x = field(data, "input/")
    y = x.lines - x.lines.mean(-1, keepdims=True)
    y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
    y = y * jnp.stack([data["param/ln_sym.weight"], data["param/ln_asym.weight"]])[:, None, None]
    c.field("output/", Isotypic(jnp.stack([y[0] + data["param/ln_sym.bias"], y[1]]), None))
    ours = isotypic.LayerNorm(WIDTH, group=FLIP, eps=1e-6)
    ours.lines[...] = jnp.stack([data["param/ln_sym.weight"], data["param/ln_asym.weight"]])
    ours.bias[...] = jnp.asarray(data["param/ln_sym.bias"])
    assert abs(run(ours, x).lines - jnp.stack([data["output/sym"], data["output/asym"]])).max() > 0.1


def layernorm(c, data, name):
    eps = {"layernorm": 1e-6, "layernorm_bigeps": 0.5, "layernorm_eps1e-5": 1e-5}[name]
    norm = fill(lambda: isotypic.LayerNorm(WIDTH, group=FLIP, eps=eps), data, below(block_pairs(), "norm1.", "norm1."))
    x = field(data, "input/")
    c.field("output/", run(norm, x))
    if "output/zero_asym/sym" in data:
        c.field("output/zero_asym/", run(norm, fields.invariant_part(x.lines[0], FLIP)))


def gelu(c, data, name):
    y, pullback = jax.vjp(jax.jit(isotypic.gelu), field(data, "input/"))
    c.field("output/", y)
    c.field("grad/", pullback(field(data, "input/cotangent/"))[0])


def mlp(c, data, name):
    layer = fill(
        lambda: isotypic.Mlp(WIDTH, 4 * WIDTH, group=FLIP, rngs=nnx.Rngs(0)), data, below(block_pairs(), "mlp.", "mlp.")
    )
    c.field("output/", run(layer, field(data, "input/")))


def attention_mixer(c, data, name):
    # Two learned numbers weigh the logits of the halves.  No recipe uses them, so we have no such layer; weighing a
    # half's logits is the same as weighing that half of the queries, which is shown here.
    weights = data.pop("param/attn_mixer")
    layer = fill(
        lambda: isotypic.Attention(WIDTH, HEADS, group=FLIP, rngs=nnx.Rngs(0)),
        data,
        below(block_pairs(), "attn.", "attention."),
    )
    x = field(data, "input/")
    assert abs(run(layer, x).lines - jnp.stack([data["output/sym"], data["output/asym"]])).max() > 10 * TOLERANCE
    queries = WIDTH // 2
    layer.qkv.lines[...] = layer.qkv.lines[...].at[..., :queries].multiply(weights[:, None, None])
    layer.qkv.bias[...] = layer.qkv.bias[...].at[:queries].multiply(weights[0])
    c.field("output/", run(layer, x))


def attention(c, data, name):
    heads, bias = (2, False) if "nobias" in name else (HEADS, True)
    layer = fill(
        lambda: isotypic.Attention(WIDTH, heads, group=FLIP, qkv_bias=bias, rngs=nnx.Rngs(0)),
        data,
        below(block_pairs(), "attn.", "attention."),
    )
    y = run(layer, field(data, "input/"))
    c.field("output/", y)
    if "output/fused/sym" in data:
        c.field("output/fused/", y)


def block(c, data, name):
    layer, x = fill(lambda: CONFIG.build(nnx.Rngs(0)).blocks[0], data, block_pairs()), field(data, "input/")
    c.field("output/", run(layer, x))
    c.field("inter/attn_branch/", jax.jit(lambda b, x: b.scale1(b.attention(b.norm1(x))))(layer, x))


def std_block(c, data, name):
    layer = fill(lambda: CONFIG.build(nnx.Rngs(0)).blocks[1], data, block_pairs(index=1))
    c.array("output/x", run(layer, jnp.asarray(data["input/x"])))


def patch_embed(c, data, name):
    side = data["param/proj_sym.weight"].shape[2]
    layer = fill(
        lambda: isotypic.PatchEmbed((side, side), 3, WIDTH, group=FLIP, rngs=nnx.Rngs(0)),
        data,
        below(flip.table(CONFIG, "deit").pairs, "patch_embed.", "patch_embed."),
    )
    grid = tuple(size // side for size in data["input/image"].shape[2:])
    y = run(layer, images(data))
    if name == "patch_embed_map_nobias":
        maps = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:2], *grid, -1).transpose(0, 1, 4, 2, 3), y)
        c.field("output/", maps)
        return
    np.testing.assert_array_equal(data["param/flatten_and_permute.permutation"], flip.token_order(grid))
    c.field("output/", official_order(y, grid))
    c.field("output/flipped_image/", official_order(run(layer, images(data)[:, :, ::-1]), grid))
    if "output/kernel/sym" in data:  # stored without the factor that ours contain
        kernels = layer.kernels().lines * np.sqrt(2)
        c.field("output/kernel/", Isotypic(kernels.transpose(0, 4, 3, 1, 2), None))


CASES = [flatten, linear, affine, layerscale, layernorm_separate, layernorm, gelu, mlp, attention_mixer, attention]
CASES += [block, std_block, patch_embed]  # of two that fit a file's name the first counts
FILES = [path for path in files("flip") if not path.stem.startswith("model")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_layer(path, record_property):
    data = load(path)
    comparison = Comparison(data)
    case = next(case for case in CASES if path.stem.startswith(case.__name__))
    case(comparison, data, path.stem)
    comparison.finish(record_property, "flip layers")
