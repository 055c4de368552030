"""Attention replaced by convolution: the op against a plain loop, its gradients, the deployed form, and errors.

Agreement with the reference files is tested in tests/parity/depthwise_test.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import kernels
from equivit.layers import dense, depthwise, isotypic
from equivit.layers.grid import Layout
from equivit.layers.relative import Attention as RelativeAttention
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

WIDTH, HEADS = 12, 3
GRIDS = ((5, 4), (1, 7), (2, 2))  # odd and not square, one row, smaller than the taps
TOLERANCE = 2e-6  # of the largest entry: float32, in another order


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def by_loops(x, taps, grid, padding):
    """The definition, token by token."""
    h, w = grid
    x, k = np.asarray(x, np.float64).reshape(*x.shape[:-2], h, w, -1), len(taps)
    y = np.zeros_like(x)
    for i, j, r, s in np.ndindex(h, w, k, k):
        a, b = i + r - k // 2, j + s - k // 2
        if padding == "wrap":
            a, b = a % h, b % w
        if 0 <= a < h and 0 <= b < w:
            y[..., i, j, :] += x[..., a, b, :] * np.asarray(taps, np.float64)[r, s]
    return y.reshape(*y.shape[:-3], h * w, -1)


def near(a, b, tolerance=TOLERANCE):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@functools.partial(jax.jit, static_argnames=("grid", "padding", "implementation"))
def convolved(x, taps, cotangent, grid, padding, implementation):
    """The convolution, and the gradients of its product with the cotangent."""
    convolve = functools.partial(depthwise.depthwise_conv, grid=grid, padding=padding)
    with kernels.using(implementation):
        y, back = jax.vjp(convolve, x, taps)
    return y, *back(cotangent)


def test_the_gradient_of_a_bias_is_not_summed_in_bfloat16():
    """Rounded to bfloat16, the sum of 1001 ones is 1000."""
    values, taps = jnp.zeros((1, 1001, 4), jnp.bfloat16), jnp.zeros((3, 3, 4), jnp.bfloat16)

    def total(bias):
        return depthwise.convolved(values, taps, (7, 143), bias=bias).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.zeros(4)), np.full(4, 1001))


@pytest.mark.parametrize(("k", "grid", "padding"), [(3, (5, 4), "zeros"), (3, (5, 4), "wrap"), (9, (3, 10), "zeros")])
def test_convolution_and_its_gradients(k, grid, padding):
    """The transposed product, too: <y, c> is <x, dx>, and <taps, dtaps>, since the map is linear in both."""
    x, taps, cotangent = random(2, 1, np.prod(grid), 5), random(k, k, 5), random(2, 1, np.prod(grid), 5, seed=1)
    expected = by_loops(x, taps, grid, padding)
    first = convolved(x, taps, cotangent, grid, padding, "auto")
    near(first[0], expected)
    for given, slope in zip((x, taps), first[1:], strict=True):
        assert slope.shape == given.shape
        near((given * slope).sum(), (expected * np.asarray(cotangent, np.float64)).sum(), 1e-4)  # of a sum of signs
    whole = convolved(x, taps, cotangent, grid, padding, "reference")
    for one, other in zip(first, whole, strict=True):
        near(one, other, 4e-6)


@pytest.mark.parametrize("batch", [(), (0,), (2, 3)])
def test_any_batch_axes(batch):
    x, taps = random(*batch, 6, 5), random(3, 3, 5)
    y = depthwise.depthwise_conv(x, taps, (2, 3))
    assert y.shape == x.shape
    near(y, by_loops(x, taps, (2, 3), "zeros")) if y.size else None


def test_low_precision_keeps_its_type_and_adds_in_float32():
    x, taps = random(1, 60, 4).astype(jnp.bfloat16), random(7, 7, 4).astype(jnp.bfloat16)
    y = convolved(x, taps, x, (6, 10), "zeros", "cpu")[0]
    assert y.dtype == jnp.bfloat16
    near(y, by_loops(x, taps, (6, 10), "zeros"), 2**-8)  # the rounding of the result alone


@functools.cache
def attention(bias=True):
    """With random biases too."""
    module = dense.Attention(WIDTH, HEADS, qkv_bias=bias, rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(module)
    return jax.tree.unflatten(tree, [random(*leaf.shape, seed=i) for i, leaf in enumerate(leaves)])


def replaced(kind, heads=None, *, form="released", bias=True, padding="zeros"):
    """A replacement with random taps, biases and logits of heads, of which no head has most of the weight."""
    module = depthwise.replace_attention(attention(bias), kind, form=form, heads=heads, padding=padding)
    logits, temperature = "gamma" if kind == "ens_dw" else "taps", depthwise.TEMPERATURES[form]
    for seed, name in enumerate(("taps", "bias", "gamma")):
        if getattr(module, name, None) is not None:
            scale = temperature if kind in ("spvit", "ens_dw") and name == logits else 1
            getattr(module, name).set_value(scale * random(*getattr(module, name).shape, seed=seed + 7))
    return module


def octic(kind):
    return depthwise.replace_attention(isotypic.Attention(16, 2, group=OCTIC, rngs=nnx.Rngs(0)), kind)


SORTS = [("conv", None), ("dw", None), ("spvit", None), ("ens_dw", None), ("conv", (0, 2)), ("dw", (1,))]


@functools.partial(jax.jit, static_argnames="grids")
def both(module, xs, grids):
    """The module and its deployed form on each grid; on the first also with the convolution that is exported."""
    folded = module.folded()
    found = [[module(x, g), folded(x, g)] for x, g in zip(xs, grids, strict=True)]
    with kernels.using("reference"):
        return [[*found[0], folded(xs[0], grids[0])], *found[1:]]


@pytest.mark.parametrize(("kind", "heads"), SORTS)
@pytest.mark.parametrize("options", [dict(), dict(form="printed"), dict(bias=False), dict(padding="wrap")], ids=str)
def test_the_deployed_form_equals_the_module(kind, heads, options):
    grids = GRIDS[:1] if options.keys() - {"form"} else GRIDS
    xs = [random(2, h * w, WIDTH) for h, w in grids]
    for ours, *others in both(replaced(kind, heads, **options), xs, grids):
        for other in others:
            near(other, ours, 4e-6)


@pytest.mark.parametrize(("kind", "form"), [("conv", "released"), ("conv", "printed"), ("dw", "released")])
def test_a_bias_on_the_wrong_side_of_the_convolution_is_caught(kind, form):
    """Values are convolved with their bias, or it follows; the other way is right inside, and wrong at the border."""
    module, x = replaced(kind, form=form), random(1, 30, WIDTH)
    taps = depthwise.taps_by_channel(kind, module.taps[...], WIDTH // HEADS)
    weight, bias = module.value.weight[...], module.value.bias[...]
    before = depthwise.depthwise_conv(x @ weight + bias, taps, (6, 5))
    behind = depthwise.depthwise_conv(x @ weight, taps, (6, 5)) + bias * taps.sum((0, 1))
    own = 0 if module.bias is None else module.bias[...]
    right, wrong = (behind, before) if (kind, form) == ("conv", "released") else (before, behind)
    near(module(x, (6, 5)), module.proj(right + own), 4e-6)
    wrong = (module.proj(wrong + own) - module(x, (6, 5))).reshape(6, 5, WIDTH)
    assert np.abs(wrong[1:-1, 1:-1]).max() < 1e-4 < 0.1 < np.abs(wrong[0]).min(-1).max()


def test_the_rectifier_and_the_temperature_of_the_released_average():
    """Without either the result is far off."""
    module, x = replaced("spvit"), random(1, 30, WIDTH)
    folded = module.folded()
    values = depthwise.DenseValues(folded.values.kernel[...], folded.values.bias[...], padding="zeros")(x, (6, 5))
    near(module(x, (6, 5)), folded.proj(jnp.maximum(values, 0)))
    share = jax.nn.softmax(module.taps[...] / 0.01, axis=0)
    kernel = jnp.einsum("hrs,ihd->rsid", share, module.value.weight[...].reshape(WIDTH, HEADS, -1))
    near(folded.values.kernel[...], kernel)
    module.form = "printed"
    assert np.abs(module(x, (6, 5)) - folded.proj(values)).max() > 0.1


def test_identity_is_one_map():
    x, whole = random(2, 30, WIDTH), attention()
    module = depthwise.replace_attention(whole, "identity")
    values = x @ whole.qkv.weight[...][:, 2 * WIDTH :] + whole.qkv.bias[...][2 * WIDTH :]
    near(module(x, (6, 5)), whole.proj(values), 4e-6)
    assert sum(leaf.size for leaf in jax.tree.leaves(module)) == WIDTH**2 + WIDTH
    field = isotypic.Attention(16, 2, group=OCTIC, rngs=nnx.Rngs(0))
    field = jax.tree.unflatten(
        jax.tree.structure(field), [random(*leaf.shape, seed=i) for i, leaf in enumerate(jax.tree.leaves(field))]
    )
    tokens = fields.from_dense(random(2, 30, 16), OCTIC)
    values = jax.tree.map(lambda leaf: leaf[..., 2 * leaf.shape[-1] // 3 :], field.qkv)(tokens)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (depthwise.replace_attention(field, "identity")(tokens), field.proj(values))), strict=True
    ):
        near(ours, theirs, 4e-6)


@pytest.mark.parametrize(("kind", "heads"), SORTS)
def test_shapes_and_what_is_inherited(kind, heads):
    options = dict(form="printed", kernel_size=5, heads=heads)
    module, number = depthwise.replace_attention(attention(), kind, **options), len(heads or range(3))
    shapes = {"conv": (number, 5, 5), "spvit": (3, 5, 5), "dw": (5, 5, 4 * number), "ens_dw": (5, 5, 4)}
    assert module.taps.shape == shapes[kind] and abs(float(module.taps[...].std()) - 0.02) < 0.008
    weight, bias = attention().qkv.weight[...], attention().qkv.bias[...]
    np.testing.assert_array_equal(module.value.weight[...], weight[:, 24:])
    np.testing.assert_array_equal(module.value.bias[...], bias[24:])
    assert module.proj is attention().proj and (module.kind, module.kernel_size) == (kind, 5)
    if heads is None:
        assert module.query_key is None and (module.gamma is None) == (kind != "ens_dw")
    else:
        kept = [h for h in range(3) if h not in heads]
        np.testing.assert_array_equal(
            module.query_key.weight[...].reshape(WIDTH, 2, len(kept), 4), weight.reshape(WIDTH, 3, 3, 4)[:, :2, kept]
        )


def test_all_heads_by_name_are_all_heads():
    module = depthwise.replace_attention(attention(), "dw", heads=(2, 0, 1))
    assert module.query_key is None and module.heads == (0, 1, 2)


def test_heads_that_stay_are_attention():
    """With taps of 0 and a projection that keeps heads apart, they give their attention, and the others the bias."""
    whole, module, x = attention(), replaced("dw", (1,)), random(2, 6, WIDTH)
    for one in (whole_copy := jax.tree.map(lambda a: a, whole), module):
        one.proj = dense.Linear(WIDTH, WIDTH, init=lambda key, shape: jnp.eye(*shape), rngs=nnx.Rngs(0))
    module.taps.set_value(jnp.zeros_like(module.taps[...]))
    ours, theirs = (np.asarray(f(x)).reshape(2, 6, 3, 4) for f in (lambda x: module(x, (2, 3)), whole_copy))
    near(ours[:, :, [0, 2]], theirs[:, :, [0, 2]])
    np.testing.assert_array_equal(ours[:, :, 1], np.broadcast_to(module.bias[...], (2, 6, 4)))
    assert np.abs(theirs[:, :, 1] - ours[:, :, 1]).max() > 0.1


class Unmoved(depthwise.IsotypicReplacedAttention):
    """A wrong layer: all channels of the regular representation have the same taps."""

    def __call__(self, x, grid=None):
        values = fields.to_regular(self.value(x))
        taps = self.taps[...]
        return self.proj(fields.from_regular(jnp.stack([depthwise.depthwise_conv(v, taps, grid) for v in values])))


@pytest.mark.parametrize("group", [OCTIC, FLIP], ids=lambda group: group.name)
@pytest.mark.parametrize("padding", ["zeros", "wrap"])
def test_equivariance_for_every_element(group, padding):
    """On a non-square grid with an even and an odd side, in float64, which resolves 1e-10."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)

        def make():
            attention = isotypic.Attention(16, 2, group=group, rngs=nnx.Rngs(0))
            return depthwise.replace_attention(attention, "dw", padding=padding)

        module = jax.tree.map(lambda a: jnp.asarray(random.normal(size=a.shape)), jax.eval_shape(make))
        x = fields.from_dense(random.normal(size=(2, 30, 16)), group)  # of NumPy, on which elements act at once
        wrong = Unmoved(module.value, module.proj, module.taps[...], num_heads=2)
        assert module.bias.shape == (2 if group is OCTIC else 8,)
        call, grids = jax.jit(lambda module, x, grid: module(x, grid), static_argnames="grid"), ((6, 5), (5, 6))
        ours, others = jax.device_get((call(module, x, grids[0]), call(wrong, x, grids[0])))
        caught = False
        for element in group.elements:
            turned, grid = fields.act(element, x, grids[0]), grids[element.count("r") % 2]
            near_field(call(module, turned, grid), fields.act(element, ours, grids[0]))
            y, expected = (a.lines for a in (call(wrong, turned, grid), fields.act(element, others, grids[0])))
            caught |= bool(np.abs(y - expected).max() > 1e-2 * np.abs(expected).max())
        assert caught


def near_field(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        near(x, y, 1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a: depthwise.replace_attention(a, "dwc"),
            "kind='dwc' is not one of conv, dw, spvit, ens_dw, identity; the near",
        ),
        (lambda a: depthwise.replace_attention(a, "dw", kernel_size=4), "kernel_size=4 must be odd.*take 3 or 5"),
        (lambda a: depthwise.replace_attention(a, "dw", form="paper"), "form='paper' is not one of released, printed"),
        (lambda a: depthwise.replace_attention(a, "dw", start="gauss"), "start='gauss' is not one of blur, normal, un"),
        (
            lambda a: depthwise.replace_attention(a, "spvit", start="blur"),
            "start='blur', but kind='spvit' weighs heads equally at the start; leave start out",
        ),
        (
            lambda a: depthwise.replace_attention(a, "identity", start="blur"),
            "kind='identity' has no taps; leave start",
        ),
        (lambda a: depthwise.replace_attention(a, "identity", heads=(1,)), "'identity' merges all heads"),
        (
            lambda a: depthwise.replace_attention(a, "identity").weights(random(1, 4, WIDTH)),
            r"replaced by a linear map \(identity\), which has no weights",
        ),
        (lambda a: depthwise.replace_attention(a, "dw", padding="wraps"), "padding='wraps' is not .*nearest is 'wrap'"),
        (
            lambda a: depthwise.replace_attention(a, "dw", heads=(0, 3)),
            r"heads=\(0, 3\) must be .* 0 to 2; None is all",
        ),
        (lambda a: depthwise.replace_attention(a, "conv", heads=(1, 1)), "must be one or more different heads"),
        (
            lambda a: depthwise.replace_attention(a, "spvit", heads=(1,)),
            "'spvit' merges all heads; take heads=None",
        ),
        (lambda a: depthwise.replace_attention(a, "ens_dw", heads=(1,)), "'ens_dw' merges all heads"),
        (lambda a: depthwise.replace_attention(replaced("dw"), "dw"), "ReplacedAttention is neither"),
        (
            lambda a: depthwise.replace_attention(RelativeAttention(8, 2, (2, 2), rngs=nnx.Rngs(0)), "dw"),
            "without relative positions",
        ),
        (
            lambda a: depthwise.isotypic_depthwise_conv(
                fields.from_dense(random(1, 4, 16), OCTIC), random(3, 3, 16), (2, 2)
            ),
            r"isotypic_depthwise_conv: taps of shape \(3, 3, 16\) must be .* here \(3, 3, 2\)",
        ),
        (lambda a: octic("dw").folded(), "has no folded form; models.inference.deployed keeps it unchanged"),
        (lambda a: dense.Attention(48, 5, rngs=nnx.Rngs(0)), "num_heads=5 must divide width=48; the nearest .* is 4"),
        (
            lambda a: replaced("dw")(random(1, 6, WIDTH), (2, 4)),
            r"6 tokens do not fill a 2x4 grid, which has 8; give one such as \(2, 3\)",
        ),
        (
            lambda a: replaced("spvit")(random(1, 7, WIDTH), Layout((2, 3), 1)),
            "1 tokens before the patches are not on the grid",
        ),
        (lambda a: replaced("dw", (1,))(random(1, 4, WIDTH), Layout(())), "call without keep="),
        (lambda a: replaced("ens_dw")(random(1, 4, WIDTH)), r"grid=None must be \(rows, columns\)"),
        (
            lambda a: replaced("conv", padding="wrap")(random(1, 4, WIDTH), (2, 2)),
            "padding='wrap' with 3x3 taps needs a grid at least as large, not 2x2; take padding='zeros'",
        ),
        (lambda a: replaced("spvit", padding="wrap")(random(1, 4, WIDTH), (2, 2)), "needs a grid at least as large"),
        (lambda a: replaced("dw").weights(random(1, 4, WIDTH)), r"replaced by a convolution \(dw\), which has no weig"),
        (lambda a: octic("conv"), "equivariant blocks support only 'dw' of all heads and 'identity'; take kind='dw'"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_what_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(attention())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "call", "rule"),
    [
        (
            (3.0, "3", None, (3, 3), True),
            lambda k: depthwise.replace_attention(attention(), "dw", kernel_size=k),
            "kernel_size={!r} must be a whole number, odd and positive; take 3",
        ),
        (
            (1, "1", (1.0,), (True,), ()),
            lambda heads: depthwise.replace_attention(attention(), "dw", heads=heads),
            "heads={!r} must be one or more different heads, 0 to 2; None is all",
        ),
        (
            (35, (-5, -7), (5.0, 7.0), (5, 7, 1), "57"),
            lambda grid: replaced("dw")(random(1, 35, WIDTH), grid),
            "grid={!r} must be (rows, columns) of the tokens, such as (5, 7) of 35",
        ),
        (
            ((3, 5, 3), (3, 3, 4), (3, 3, 1), (3, 3)),
            lambda shape: depthwise.depthwise_conv(random(1, 4, 3), random(*shape), (2, 2)),
            "taps of shape {!r} must be [k, k, C], with k = 3 here (3, 3, 3)",
        ),
    ],
    ids=["kernel_size", "heads", "grid", "taps"],
)
def test_other_types_and_shapes_are_refused(values, call, rule):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(rule.format(value))):
            call(value)
