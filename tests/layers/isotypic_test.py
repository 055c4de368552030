"""Every isotypic layer commutes with every element, with all parameters random; wrong layers are caught."""

import dataclasses
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

from equivit import kernels, testing
from equivit.layers import dense, isotypic
from equivit.layers.block import Block
from equivit.layers.dropout import dropout
from equivit.layers.parts import Parts
from equivit.layers.stochastic_depth import drop_path
from equivit.layers.taps import drawn
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC
from tests.drawing import normal
from tests.symmetry.fields_test import random_field

GROUPS = pytest.mark.parametrize("group", [FLIP, OCTIC], ids=lambda g: g.name)
GRID, PREFIX = (2, 3), 1
WIDTH = 32


def layers(group):
    rngs = nnx.Rngs(0)
    block = Block(**Parts(group, rngs, layer_scale=0.5).branches(WIDTH, 2, 64))
    return {
        "linear": isotypic.Linear(WIDTH, 48, group=group, rngs=rngs),
        "norm": isotypic.LayerNorm(WIDTH, group=group),
        "balanced norm": isotypic.LayerNorm(WIDTH, group=group, weighting="balanced"),
        "layer scale": block.scale1,
        "mlp": block.mlp,
        "attention": block.attention,
        "block": block,
    }


class CommutesTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(group=(FLIP, OCTIC), name=tuple(layers(OCTIC)))
    def test_commutes(self, group, name):
        layer = testing.randomise(jax.eval_shape(lambda: layers(group)[name]), jax.random.key(1))
        x = random_field(group, GRID, WIDTH // group.order, PREFIX)
        apply = functools.partial(self.variant(lambda layer, x: layer(x)), layer)
        testing.assert_equivariant(apply, group, x, input="field", output="field", prefix=PREFIX, grid=GRID)


@GROUPS
@pytest.mark.parametrize("layer_scale", [0.5, None])
def test_a_branch_in_one_operation_is_the_sum_of_its_parts(group, layer_scale):
    """In a block it is one, unless there is a key, for stochastic depth; here that has a rate of 0."""
    width, hidden = 8 * group.order, 128 * group.order
    options = dict(layer_scale=layer_scale, isotypic_eps=0.1, isotypic_norm="balanced")  # both matter
    block = jax.eval_shape(lambda: Block(**Parts(group, nnx.Rngs(0), **options).branches(width, 2, hidden)))
    block, x = testing.randomise(block, jax.random.key(1)), random_field(group, GRID, 8, PREFIX)
    with kernels.using("interpret"):
        traced = jax.jit(lambda block, x: block(x)).trace(block, x)
    for name in ("octic_attention", "octic_mlp"):
        assert (f"name={name}" in str(traced.jaxpr)) == (group is OCTIC and layer_scale is not None)
    found = traced.lower().compile()(block, x)
    expected = jax.jit(lambda block, x, key: block(x, key=key))(block, x, jax.random.key(0))
    chex.assert_trees_all_close(found, expected, atol=1e-5, rtol=1e-6)


@GROUPS
def test_gelu_commutes(group):
    x = random_field(group, GRID, 4, PREFIX)
    testing.assert_equivariant(isotypic.gelu, group, x, "field", "field", PREFIX, grid=GRID)


@GROUPS
@pytest.mark.parametrize("size", [(12, 12), (12, 24)], ids=str)
def test_patch_embedding_commutes(group, size):
    layer = jax.eval_shape(lambda: isotypic.PatchEmbed((4, 4), 3, WIDTH, group=group, rngs=nnx.Rngs(0)))
    layer = testing.randomise(layer, jax.random.key(1))
    x = normal(2, *size, 3)
    grid = (size[0] // 4, size[1] // 4)
    testing.assert_equivariant(layer, group, x, output="field", output_grid=grid)


@GROUPS
@pytest.mark.parametrize("init", ["truncated_normal", "xavier_uniform"])
def test_initial_weights_have_the_variance_of_dense_ones(group, init):
    """Relative to dense maps of the size of an irrep, and to a dense kernel of the whole patch.

    Ten thousand and more draws leave 1 % of chance on a standard deviation.
    """
    parts, width = Parts(group, nnx.Rngs(0), init=init), 128
    plain, c = parts.of(None), width // group.order
    mlp = parts.mlp(width, 4 * width)
    sizes = {"lines": (c, 4 * c), "planes": (2 * c, 8 * c)}
    for name, weight in zip(sizes, mlp.fc1.arrays()[0], strict=False):
        wanted = 0.88 * 0.02 if init == "truncated_normal" else np.sqrt(2 / sum(sizes[name]))
        np.testing.assert_allclose(weight.std(), wanted, rtol=0.03)
    kernel = fields.to_dense(parts.patch_embed((8, 8), 3, width).kernels())
    np.testing.assert_allclose(kernel.std(), plain.patch_embed((8, 8), 3, width).kernel[...].std(), rtol=0.03)


@GROUPS
def test_unpatchify_commutes(group):
    layer = jax.eval_shape(lambda: isotypic.Unpatchify(WIDTH, (6, 6), 5, group=group, rngs=nnx.Rngs(0)))
    layer = testing.randomise(layer, jax.random.key(1))
    x = random_field(group, GRID, WIDTH // group.order)

    def to_image(field):  # the caller gives the grid; a quarter turn swaps it
        return layer(field, to_image.grid)

    upright = layer(x, GRID)
    for g in group.elements:
        to_image.grid = GRID[::-1] if g.count("r") % 2 else GRID
        moved, expected = to_image(fields.act(g, x, GRID)), fields.act_on_image(g, upright)
        chex.assert_trees_all_close(moved, expected, rtol=0, atol=1e-5 * float(abs(upright).max()))


@GROUPS
def test_unpatchify_is_every_equivariant_linear_map_to_a_patch(group):
    """The regular representation has as many equivariant maps into a space as the space has dimensions."""
    layer = isotypic.Unpatchify(group.order, (4, 4), 3, group=group, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    x = fields.from_dense(jnp.eye(group.order), group)  # a token for each component
    by_weight = jax.jit(jax.jacobian(lambda weights: nnx.merge(graph, weights).patches(x)))(weights)
    by_weight = {name: np.asarray(a[...]).reshape(48 * group.order, -1) for name, a in by_weight["linear"].items()}
    by_weight.pop("bias")
    assert np.linalg.matrix_rank(np.concatenate(list(by_weight.values()), axis=1), tol=1e-4) == 48
    if group is OCTIC:  # the official layer computes a second copy of E, which no pixel depends on
        assert np.linalg.matrix_rank(by_weight["planes"], tol=1e-4) == by_weight["planes"].shape[1]


@pytest.mark.parametrize("weighting,deviation", [("official", np.sqrt(8 / 5)), ("balanced", 1.0)])
def test_norm_of_unit_variance(weighting, deviation):
    # Enough channels for the estimated variance of a token to hardly vary: at 512 of them its root is biased by 0.2 %.
    x = random_field(OCTIC, (8, 8), 512)
    y = fields.to_dense(isotypic.LayerNorm(4096, group=OCTIC, weighting=weighting)(x))
    np.testing.assert_allclose(float(y.std()), deviation, rtol=2e-3)


@GROUPS
def test_dropout_keeps_the_symmetry_and_the_mean(group):
    key, x = jax.random.key(3), random_field(group, GRID, 512)
    y = dropout(x, 0.25, key)
    if group is OCTIC:  # one mask for both rows of E
        chex.assert_trees_all_equal(y.planes[0] == 0, y.planes[1] == 0)
    for leaf in jax.tree.leaves(jax.tree.map(lambda a, b: jnp.where(a == 0, 0.75, a / jnp.where(b == 0, 1, b)), y, x)):
        chex.assert_trees_all_close(leaf, 0.75 * jnp.where(leaf > 1, 1 / 0.75**2, 1), rtol=1e-5)
    share = float((y.lines == 0).mean())
    assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / y.lines.size)  # five deviations of a binomial share


def test_drop_path_draws_once_per_sample():
    x = random_field(OCTIC, GRID, 4, batch=(1000,))
    y = drop_path(x, 0.3, jax.random.key(0))
    gone = fields.to_dense(y).reshape(1000, -1) == 0
    assert ((gone.all(1)) | (~gone.any(1))).all()
    assert abs(gone.all(1).mean() - 0.3) < 5 * np.sqrt(0.21 / 1000)
    kept = ~gone.all(1)
    chex.assert_trees_all_close(fields.to_dense(y)[kept], fields.to_dense(x)[kept] / 0.7, rtol=1e-6)


class TestWrongLayersAreCaught:
    """The test of the tests: each breaks the symmetry in one way only."""

    field = random_field(OCTIC, GRID, 4)

    def caught(self, layer, match):
        with pytest.raises(AssertionError, match=match):
            testing.assert_equivariant(layer, OCTIC, self.field, "field", "field", grid=GRID)

    def test_bias_outside_the_invariant_part(self):
        self.caught(lambda x: dataclasses.replace(x, lines=x.lines + 0.1), r"octic element 'r': irrep B1 deviates by")

    def test_rows_of_e_treated_differently(self):
        scale = jnp.array([1.0, 1.1]).reshape(2, 1, 1, 1)
        self.caught(
            lambda x: dataclasses.replace(x, planes=x.planes * scale), r"octic element 'r': irrep E deviates by"
        )

    def test_pointwise_gelu(self):
        self.caught(lambda x: jax.tree.map(jax.nn.gelu, x), "octic element")

    def test_mixed_irreps(self):
        self.caught(lambda x: dataclasses.replace(x, lines=x.lines[::-1]), "octic element")

    def test_dense_dropout(self):
        def wrong(x):
            return jax.tree.map(lambda leaf: dropout(leaf, 0.3, jax.random.key(0)), x)

        self.caught(wrong, "octic element")

    def test_zero_output(self):
        self.caught(lambda x: jax.tree.map(jnp.zeros_like, x), "the output is zero")

    def test_not_finite(self):
        self.caught(lambda x: jax.tree.map(lambda leaf: leaf / 0, x), "assert_equivariant: the output is not finite")


@pytest.mark.parametrize(
    "make,message",
    [
        (
            lambda r: isotypic.Linear(20, 32, group=OCTIC, rngs=r),
            "width 20 must be divisible by 8.*nearest are 16 and 24",
        ),
        (lambda r: isotypic.Attention(64, 6, group=OCTIC, rngs=r), "num_heads=6 times 8.*nearest is 48"),
        (lambda r: isotypic.PatchEmbed((7, 7), 3, 64, group=OCTIC, rngs=r), "patch size 7x7.*nearest are 6x6 and 8x8"),
        (lambda r: isotypic.PatchEmbed((2, 2), 3, 64, group=OCTIC, rngs=r), "at least 4.*nearest are 4x4 and 6x6"),
        (lambda r: isotypic.PatchEmbed((8, 4), 3, 64, group=OCTIC, rngs=r), "patch size 8x4: must be square"),
        (lambda r: isotypic.PatchEmbed((8, 7), 3, 64, group=FLIP, rngs=r), "width must be even.*nearest are 6 and 8"),
        (lambda r: isotypic.LayerNorm(64, group=OCTIC, weighting="both"), "weighting='both' must be"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(nnx.Rngs(0))


@GROUPS
def test_an_array_and_a_field_of_another_group_are_refused(group):
    """Every layer between fields names itself and the way to a field; none needs `rngs` to be left out."""
    rngs, other = nnx.Rngs(0), FLIP if group is OCTIC else OCTIC
    layers = {
        "Linear": isotypic.Linear(32, 32, group=group, rngs=rngs),
        "LayerNorm": isotypic.LayerNorm(32, group=group, rngs=rngs),
        "LayerScale": isotypic.LayerScale(32, 1.0, group=group, rngs=rngs),
        "Mlp": isotypic.Mlp(32, 32, group=group, rngs=rngs),
        "Attention": isotypic.Attention(32, 2, group=group, rngs=rngs),
    }
    array = jnp.ones((2, 3, 32))
    for name, layer in layers.items():
        with pytest.raises(ValueError, match=rf"^{name}: x is an array \[2, 3, 32\] .*fields.from_dense"):
            layer(array)
        with pytest.raises(ValueError, match=f"^{name}: x is a field of the {other.name} group"):
            layer(fields.from_dense(array, other))
        assert layer(fields.from_dense(array, group)).shape == array.shape
    with pytest.raises(ValueError, match="^gelu: .*fields.from_dense"):
        isotypic.gelu(array)


@pytest.mark.parametrize("num_heads", [0, -1, 2.0])
def test_a_number_of_heads_is_a_positive_integer(num_heads):
    with pytest.raises(ValueError, match=f"num_heads={num_heads} must be a positive integer"):
        isotypic.Attention(16, num_heads, group=OCTIC, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("group", ["octic", None])
def test_a_group_is_an_object(group):
    with pytest.raises(ValueError, match=f"Linear in: group={group!r} must be groups.OCTIC or groups.FLIP"):
        isotypic.Linear(16, 16, group=group, rngs=nnx.Rngs(0))


@GROUPS
def test_a_field_of_another_width_is_refused(group):
    rngs, x = nnx.Rngs(0), random_field(group, (2, 3), 64 // group.order)
    layers = [isotypic.Linear(32, 64, group=group, rngs=rngs), isotypic.LayerNorm(32, group=group)]
    layers += [isotypic.Attention(32, 2, group=group, rngs=rngs), isotypic.LayerScale(32, 1.0, group=group)]
    for layer in layers:
        with pytest.raises(ValueError, match=r"has width 64; the layer reads width 32"):
            layer(x)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (1, 8, 6, 3), (1, 8, 8, 1)], ids=str)
def test_patch_embeddings_check_their_images(shape):
    rngs = nnx.Rngs(0)
    embeds = dense.PatchEmbed((4, 4), 3, 16, rngs=rngs), isotypic.PatchEmbed((4, 4), 3, 16, group=OCTIC, rngs=rngs)
    for embed in embeds:
        with pytest.raises(ValueError, match="^image"):
            embed(jnp.ones(shape))
        with pytest.raises(ValueError, match="images are uint8"):
            embed(jnp.ones((1, 8, 8, 3), jnp.uint8))


def test_dense_norms_and_rates():
    x = jnp.array([[1, 2, 4]])
    norm = dense.LayerNorm(3)
    chex.assert_trees_all_equal(norm(x), norm(x.astype(jnp.float32)))
    for rate in (1.0, 2, -0.5):
        with pytest.raises(ValueError, match="must be at least 0 and below 1"):
            dropout(jnp.ones(3), rate, jax.random.key(0))


def test_parameters_have_one_type_in_float64():
    with jax.enable_x64(True):
        layer = dense.Linear(2, 3, init=dense.xavier_uniform, rngs=nnx.Rngs(0))
        taps = drawn("blur", jax.random.key(0), 3, 2)
        assert layer.weight.dtype == layer.bias.dtype == taps.dtype == jnp.float64


def test_models_with_an_activation_can_be_pickled():
    for activation in (*dense.ACTIVATIONS.values(), dense.relu):
        assert pickle.loads(pickle.dumps(activation)) is activation
