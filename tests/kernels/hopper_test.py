"""The Hopper kernels of octic branches: values in the GPU interpreter, which the newest JAX has, and lowering."""

import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import kernels
from equivit.kernels import dispatch
from equivit.kernels.d8_gelu.reference import d8_gelu
from equivit.kernels.hopper import gelu, heads, irreps, norm, norm_gradient, residual, rows, vectors
from equivit.kernels.isotypic_attention import irrep_by_irrep
from equivit.kernels.isotypic_linear import linear
from equivit.kernels.norm import Norm, fork
from equivit.kernels.norm.reference import centred, inverse_deviation, normalise, standardise
from equivit.kernels.octic_branch import Weights, octic_attention, octic_mlp
from equivit.kernels.octic_branch.gpu import MAPS
from equivit.kernels.octic_linear_gelu import octic_feed_forward
from equivit.kernels.octic_linear_gelu.reference import octic_linear_gelu
from equivit.layers.block import Block
from equivit.layers.parts import Parts
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC
from experiments.benchmarks.field_shapes import Shape
from tests.kernels.comparison import assert_near, draw, draw_arguments, draw_branch, value_and_gradient, widen

NORM = Norm(1e-5, 0.5)


def exactly(function, *arrays):
    """The function with all products in float32."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*widen(arrays))


def distance(found, others):
    """The largest distance between two fields."""
    pairs = zip(found, others, strict=True)
    return max(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max() for a, b in pairs)


def among_others(group):
    """Vectors that do not begin their array, nor end it."""
    return vectors.packed(jnp.full((3, 64), 7.0), group, jnp.full((2, 32), 7.0))[1]


@pytest.mark.parametrize("rows", [[(7, 160), (12, 64), (7, 160)], [(7, 96), (4, 32), (7, 96)], [(1, 32)]])
def test_every_kernel_sees_its_own_vectors(rows):
    groups = draw(rows, "bfloat16")
    packed = vectors.packed(*groups)
    assert len({one.array.size for one in packed}) == 1
    for one, group in zip(packed, groups, strict=True):
        assert one.array.dtype == jnp.float32 and one.array.shape[1] == group.shape[1]
        np.testing.assert_array_equal(one.array[one.first : one.first + len(group)], group.astype(jnp.float32))
    with jax.enable_x64(True):
        assert {one.array.dtype for one in vectors.packed(*groups)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("m, c, dtype", [(37, 160, "float32"), (21, 96, "bfloat16"), (8, 128, "float32")])
def test_the_norm_is_the_reference_s(m, c, dtype, interpreter):
    field, drawn = draw([(4, m, c), (2, m, 2 * c)], dtype), draw([(4, c), (2 * c,), (c,)], "float32", seed=1)
    of_norm = among_others(vectors.of_field(*drawn))
    found = jax.jit(functools.partial(norm.forward, norm=NORM, dtype=jnp.bfloat16))(*field, of_norm)
    scale_lines, scale_planes, bias = drawn
    assert_near(found, normalise(widen(field), (scale_lines, scale_planes), bias, NORM), absolute=1e-5)


@pytest.mark.parametrize(
    "m, c, dtype, narrow",
    [(37, 160, "float32", "bfloat16"), (3, 96, "bfloat16", "bfloat16"), (21, 128, "float32", "float32")],
)
def test_the_gradient_of_the_norm_is_the_reference_s(m, c, dtype, narrow, interpreter):
    draws = [draw([(4, m, c), (2, m, 2 * c)], dtype, seed) for seed, dtype in enumerate((dtype, dtype, narrow))]
    field, kept, of_standardised = draws
    constants = Norm(eps=3.0, row_weight=0.7)  # both matter
    found = jax.jit(functools.partial(norm_gradient.backward, norm=constants))(*field, *kept, *of_standardised)
    assert {y.dtype for y in found} == {jnp.dtype(dtype)}
    field, kept, of_standardised = map(widen, draws)

    @jax.jit
    def expected(constants):
        (pulled,) = jax.vjp(lambda field: standardise(field, constants), field)[1](of_standardised)
        return jax.tree.map(jnp.add, kept, pulled)

    assert_near(found, expected(constants), absolute=1e-5)
    wrong = {"weight of rows of E": expected(Norm(3.0, 0.5)), "epsilon": expected(Norm(0.3, 0.7))}
    wrong["gradient of the field"] = jax.tree.map(lambda a, b: np.asarray(a) - b, expected(constants), kept)

    @jax.jit
    def without_projection(field, kept, of_standardised):
        inverse = inverse_deviation(centred(field), constants)
        return tuple(a + b * inverse for a, b in zip(kept, centred(of_standardised), strict=True))

    wrong["projection"] = without_projection(field, kept, of_standardised)
    for name, other in wrong.items():
        assert distance(found, other) > 0.1, name


def summed(x_lines, x_planes, h_lines, h_planes, w_lines, w_planes, bias, scale_lines, scale_planes, **options):
    """`residual.forward` of arrays."""
    of_sum = among_others(vectors.of_field(scale_lines, scale_planes, bias))
    return residual.forward(x_lines, x_planes, h_lines, h_planes, w_lines, w_planes, of_sum, **options)


def draw_sum(m, f, c, stream):
    """Arguments of `summed`, with terms of the same size."""
    x, h = draw([(4, m, c), (2, m, 2 * c)], stream), draw([(4, m, f), (2, m, 2 * f)], "bfloat16", seed=1)
    w = draw([(4, f, c)], "bfloat16", 2, f**-0.5) + draw([(2 * f, 2 * c)], "bfloat16", 3, (2 * f) ** -0.5)
    return (*x, *h, *w, *draw([(c,), (4, c), (2 * c,)], "float32", 4))


def residual_reference(x_lines, x_planes, h_lines, h_planes, w_lines, w_planes, bias, scale_lines, scale_planes):
    lines, planes = linear((h_lines, h_planes), ((w_lines, w_planes), bias))
    return x_lines + scale_lines[:, None] * lines, x_planes + scale_planes * planes


@pytest.mark.parametrize(
    "m, f, c, stream", [(130, 96, 96, "float32"), (37, 64, 32, "bfloat16"), (300, 32, 160, "float32")]
)
def test_the_residual_sum_is_the_reference_s(m, f, c, stream, interpreter):
    arrays = draw_sum(m, f, c, stream)
    assert_near(jax.jit(summed)(*arrays), exactly(residual_reference, *arrays), absolute=1e-5)


def test_other_tiles_give_the_same_sum_and_a_wrong_one_is_caught(interpreter):
    arrays = draw_sum(70, 64, 64, "float32")
    tile = residual.Tile(width=32, depth=64, slots=2)
    found = jax.jit(functools.partial(summed, tile=tile))(*arrays)
    assert_near(found, exactly(residual_reference, *arrays), absolute=1e-5)
    names = ["h_lines", "h_planes", "w_lines", "w_planes", "bias", "scale_lines", "scale_planes"]
    terms, reference = dict(zip(names, map(np.asarray, widen(arrays[2:])), strict=True)), jax.jit(residual_reference)
    wrong = {
        "rows of E": dict(h_planes=terms["h_planes"][::-1]),
        "copies of E": dict(w_planes=np.roll(terms["w_planes"], 64, axis=0)),
        "irreps of the weights": dict(w_lines=terms["w_lines"][::-1]),
        "no bias": dict(bias=0 * terms["bias"]),
        "irreps of the layer scale": dict(scale_lines=terms["scale_lines"][::-1]),
        "copies of the layer scale": dict(scale_planes=np.roll(terms["scale_planes"], 64)),
    }
    for name, others in wrong.items():
        assert distance(found, reference(*arrays[:2], **(terms | others))) > 0.1, name


def activated(lines, planes, w_lines, w_planes, bias):
    """`gelu.forward` of arrays."""
    return gelu.forward(lines, planes, w_lines, w_planes, among_others(gelu.of_bias(bias)))


@pytest.mark.parametrize("m, c, f", [(197, 32, 96), (8, 96, 64), (130, 16, 128)])
def test_the_gelu_is_the_reference_s(m, c, f, interpreter):
    arrays = draw_arguments(Shape("", (), m, c, f), "bfloat16")
    assert_near(jax.jit(activated)(*arrays), exactly(octic_linear_gelu, *arrays))


def test_the_gradient_of_the_gelu_is_the_reference_s(interpreter):
    m, c, f = 37, 32, 96
    hidden, gradient = draw([(4, m, f), (2, m, 2 * f)], "bfloat16"), draw([(4, m, c), (2, m, 2 * c)], "bfloat16", 1)
    weights = draw([(4, f, c)], "bfloat16", 2, c**-0.5) + draw([(2 * f, 2 * c)], "bfloat16", 3, (2 * c) ** -0.5)
    found = jax.jit(gelu.backward)(*hidden, *gradient, *weights)

    def pulled(lines, planes, gradient_lines, gradient_planes, *weights):
        def of_mlp(lines, planes):
            return linear(d8_gelu(lines, planes), (weights, None))

        return jax.vjp(of_mlp, lines, planes)[1]((gradient_lines, gradient_planes))

    def expected(*hidden):
        return exactly(pulled, *hidden, *gradient, *weights)

    assert_near(found, expected(*hidden))
    lines, planes = map(np.asarray, hidden)
    wrong = {
        "channels": (np.roll(lines, 16, axis=-1), np.roll(planes, 16, axis=-1)),
        "rows of E": (lines, planes[::-1]),
        "copies of E": (lines, np.roll(planes, f, axis=-1)),
        "irreps": (lines[::-1], planes),
    }
    for name, other in wrong.items():
        assert distance(found, expected(*other)) > 0.1, name


def test_an_mlp_in_training_has_a_kernel_for_each_direction(interpreter):
    field, w_lines, w_planes, bias = (arrays := draw_arguments(Shape("", (3,), 7, 32, 64), "bfloat16"))[:2], *arrays[2:]
    second = draw([(4, 64, 32)], "bfloat16", 5, 0.1) + draw([(128, 64), (32,)], "bfloat16", 6, 0.1)
    arrays, slopes = (*field, w_lines, w_planes, bias, *second), draw([a.shape for a in field], "bfloat16", seed=7)

    def on(implementation, lines, planes, w_lines, w_planes, bias, v_lines, v_planes, other):
        first, second = ((w_lines, w_planes), bias), ((v_lines, v_planes), other)
        return octic_feed_forward((lines, planes), first, second, implementation=implementation)

    op = functools.partial(on, "gpu")
    text = str(jax.make_jaxpr(lambda *a: jax.vjp(op, *a)[1](slopes))(*arrays))
    assert gelu.WITH_HIDDEN in text and gelu.BACKWARD in text
    found = value_and_gradient(op, arrays, slopes)
    with jax.default_matmul_precision("highest"):
        expected = value_and_gradient(functools.partial(on, "xla"), widen(arrays), widen(slopes))
    for a, b in zip(found, expected, strict=True):  # both hidden fields are rounded, sums are of 21 rows
        assert distance([a], [b]) < 0.02 * float(np.abs(b).max())


def test_parts_of_the_same_rows_go_to_different_clusters(interpreter, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 2 * rows.CLUSTER)
    assert rows._Tiles.cut(1, 4, 1).parts == 2
    arrays = draw_arguments(Shape("", (), 37, 16, 128), "bfloat16")
    assert_near(jax.jit(activated)(*arrays), exactly(octic_linear_gelu, *arrays))


@pytest.mark.parametrize("m, width, number", [(37, 32, 4), pytest.param(70, 80, 8, id="10 channels"), (8, 64, 4)])
def test_heads_are_the_reference_s_and_come_apart(m, width, number, interpreter):
    field = draw([(4, m, width), (2, m, 2 * width)], "bfloat16")
    w = draw([(4, width, 3 * width)], "bfloat16", 1, width**-0.5)
    w += draw([(2 * width, 6 * width)], "bfloat16", 2, (2 * width) ** -0.5) + draw([(3 * width,)], "float32", 3)
    c, (*maps, bias) = width // number, w
    of_bias = among_others(heads.of_bias(bias, c))
    found = jax.jit(functools.partial(heads.forward, heads=number))(*field, *maps, of_bias)
    expected = exactly(lambda *a: linear(a[:2], (a[2:4], a[4])), *field, *w)
    assert_near(irreps.natural(jax.jit(irreps.forward)(*found), c), expected)
    alone = irreps.natural(jax.jit(irreps.forward)(found[1]), c)
    keys = tuple(np.split(np.asarray(leaf), 3, axis=-1)[1] for leaf in expected)
    assert_near(alone, keys)
    if c % 8:
        assert distance(irreps.arranged(alone, c), keys) > 0.1
    else:  # heads of 8 channels are in the order of the reference
        for y, leaf in zip(irrep_by_irrep(jnp.swapaxes(found[1], 0, 1), 2), alone, strict=True):
            np.testing.assert_array_equal(y, leaf)


def mixed(arrays):
    """Arguments of a branch in float32, with the maps in bfloat16."""
    lines, planes, *weights = arrays
    w = Weights(*weights)
    return (lines, planes, *w._replace(**{name: getattr(w, name).astype(jnp.bfloat16) for name in MAPS}))


def mlp(implementation, lines, planes, *weights):
    return octic_mlp(lines, planes, Weights(*weights), NORM, implementation=implementation)


def attention(implementation, lines, planes, *weights):
    return octic_attention(lines, planes, Weights(*weights), lines.shape[-1] // 8, NORM, implementation=implementation)


def attention_arrays(shape):
    field, c = draw(shape.field(shape.channels), "float32"), shape.channels
    deviations = (1, 1, 1, c**-0.5, (2 * c) ** -0.5, 1, c**-0.5, (2 * c) ** -0.5, 1, 1, 1)
    weights = draw(shape.attention_branch(), "float32", 1, 1.0)
    return (*field, *(w * d for w, d in zip(weights, deviations, strict=True)))


BRANCHES = {  # more rows than a tile, two batch axes
    "mlp": (mlp, draw_branch, Shape("", (2, 1), 37, 32, 64)),
    "attention": (attention, attention_arrays, Shape("", (2,), 37, 32, 0)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_loses_less_than_plain_xla_s(name, interpreter):
    """Both round the factors of the products, and the kernels less of what is in between."""
    branch, arguments, shape = BRANCHES[name]
    arrays = mixed(arguments(shape) if name == "attention" else arguments(shape, "float32"))
    ours, plain = (jax.jit(functools.partial(branch, i))(*arrays) for i in ("gpu", "xla"))
    exact = exactly(functools.partial(branch, "xla"), *arrays)
    for a, b, truth in zip(ours, plain, exact, strict=True):
        assert a.dtype == b.dtype == jnp.float32
        a, b = np.asarray(a) - truth, np.asarray(b) - truth
        assert 0 < np.square(a).mean() <= np.square(b).mean()


@pytest.mark.parametrize("name", BRANCHES)
def test_a_program_for_cuda_has_the_kernels_if_asked(name, monkeypatch):
    sizes = {"mlp": ("mlp_branch", ["octic_norm", "octic_mlp_gelu", "octic_residual"])}
    sizes["attention"] = ("attention_branch", ["octic_norm", "octic_heads", "octic_irreps", "octic_residual"])
    branch, (weights, expected) = BRANCHES[name][0], sizes[name]
    shape = Shape("", (8,), 197, 96, 384)
    shapes = [*shape.field(shape.channels), *getattr(shape, weights)()]
    types = [jnp.bfloat16 if field in MAPS else jnp.float32 for field in ("", "", *Weights._fields)]
    arrays = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, types, strict=True)]

    def found(function, using="gpu"):
        with kernels.using(using):
            text = jax.jit(lambda *a: function("auto", *a)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        return [kernel for kernel in expected if rf"\00{kernel}_mosaic_gpu\00" in text]

    assert found(branch) == expected
    assert found(branch, "auto") == []
    monkeypatch.setattr(dispatch, "hopper", lambda: False)
    assert found(branch) == []


def fork_and_gradient(field, kept, of_standardised):
    """Both results of the operation, and the gradient of the field from both of theirs."""
    results, pull = jax.vjp(lambda field: fork(field, NORM, of_standardised[0].dtype), field)
    return results, pull((kept, of_standardised))[0]


def test_the_kernels_of_a_fork_run_if_asked_and_have_derivatives(interpreter):
    shapes = [(4, 2, 5, 32), (2, 2, 5, 64)]
    arrays = [draw(shapes, dtype, seed) for seed, dtype in enumerate(("float32", "float32", "bfloat16"))]
    apart = jax.vmap(fork_and_gradient, 1, 1)  # a kernel sees both images as one batch

    def both(function, *arrays):
        return function(*arrays), jax.jvp(fork_and_gradient, arrays, arrays)

    expected = jax.jit(functools.partial(both, fork_and_gradient))(*arrays)
    with kernels.using("gpu"):
        found = jax.jit(functools.partial(both, apart))(*arrays)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_near([a], [b], absolute=2e-5)


def test_a_program_for_cuda_has_the_kernels_of_a_fork_if_asked(monkeypatch):
    shapes = Shape("", (8,), 197, 96, 384).field(96)
    dtypes = (jnp.float32, jnp.float32, jnp.bfloat16)
    arrays = [tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes) for dtype in dtypes]

    def found(using):
        with kernels.using(using):
            traced = jax.jit(lambda *a: fork_and_gradient(*a)).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return [rf"\00{name}_mosaic_gpu\00" in text for name in ("octic_norm", "octic_norm_gradient")]

    assert found("gpu") == [True, True] and found("auto") == [False, False]
    monkeypatch.setattr(dispatch, "hopper", lambda: False)
    assert found("gpu") == [False, False]


TRAINING = ["octic_norm", "octic_norm_gradient", "octic_heads", "octic_irreps", gelu.WITH_HIDDEN, gelu.BACKWARD]


@pytest.mark.parametrize(
    "rate, width, number, hidden, expected",
    [
        pytest.param(0.0, 512, 4, 512, [2, 2, 2, 2, 1, 1], id="all"),
        pytest.param(0.5, 256, 8, 384, [2, 2, 0, 0, 0, 0], id="norms alone support the widths"),
    ],
)
def test_a_block_in_training_has_the_kernels_if_asked(rate, width, number, hidden, expected):
    def build():
        block = Block(**Parts(OCTIC, nnx.Rngs(0), layer_scale=0.5).branches(width, number, hidden))
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), block)

    shapes = Shape("", (2,), 9, width // 8, 0).field(width // 8)
    x = Isotypic(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    key = jax.random.key(0) if rate else None

    def loss(block, x):
        return sum(leaf.sum() for leaf in jax.tree.leaves(block(x, rate=rate, key=key)))

    with kernels.using("gpu"):
        traced = jax.jit(jax.grad(loss, argnums=1)).trace(jax.eval_shape(build), x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [kernel_calls(text, name) for name in TRAINING] == expected


def kernel_calls(text, name):
    """How often a program calls a kernel, whose code it has once for each shape, in a function of its own."""
    functions = [part for part in text.split("func.func ") if rf"\00{name}_mosaic_gpu\00" in part]
    return sum(text.count(f"call {part[part.index('@') : part.index('(')]}(") for part in functions)


SIZES = {"ViT-B": (96, 384, 12), "ViT-L": (128, 512, 16), "ViT-H": (160, 640, 16)}  # channels, hidden ones, heads


def traced_kernels(c, f, number):
    """Each kernel of a model of C channels, with its arguments."""
    m = 64

    def field(width, dtype=jnp.bfloat16):
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, m, width), (2, m, 2 * width))]

    def weights(before, after):
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, before, after), (2 * before, 2 * after))]

    def of(rows, *shapes):
        return jax.eval_shape(lambda *drawn: among_others(rows(*drawn)), *shapes)

    def bias(n):
        return jax.ShapeDtypeStruct((n,), jnp.float32)

    stream = field(c, jnp.float32)
    scaled = of(vectors.of_field, jax.ShapeDtypeStruct((4, c), jnp.float32), bias(2 * c), bias(c))
    of_heads, of_gelu = of(functools.partial(heads.of_bias, c=c // number), bias(3 * c)), of(gelu.of_bias, bias(f))
    yield functools.partial(norm.forward.__wrapped__, norm=NORM, dtype=jnp.bfloat16), [*stream, scaled]
    yield functools.partial(norm_gradient.backward.__wrapped__, norm=NORM), [*stream, *stream, *field(c)]
    yield functools.partial(heads.forward.__wrapped__, heads=number), [*field(c), *weights(c, 3 * c), of_heads]
    yield irreps.forward.__wrapped__, [jax.ShapeDtypeStruct((m, number, 8 * c // number), jnp.bfloat16)] * 3
    yield functools.partial(gelu.forward.__wrapped__, hidden=True), [*field(c), *weights(c, f), of_gelu]
    yield gelu.backward.__wrapped__, [*field(f), *field(c), *weights(f, c)]
    yield residual.forward.__wrapped__, [*stream, *field(f), *weights(f, c), scaled]


@pytest.mark.slow
def test_the_kernels_of_vit_h_lower_for_cuda():
    """Its heads of ten channels have bank conflicts in shared memory, which JAX 0.12 refuses unless asked.

    The residual sum, which has none, is lowered with all its tiles in the tests of `benchmarks.hopper_tiles`.
    """
    *others, _ = traced_kernels(*SIZES["ViT-H"])
    for kernel, arguments in others:
        traced = jax.jit(lambda *a, kernel=kernel: kernel(*a)).trace(*arguments)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text(), kernel


@pytest.mark.parametrize("model", SIZES)
def test_tma_copies_to_and_from_multiples_of_128_bytes(model, monkeypatch):
    """On a card, a part of shared memory that begins elsewhere is a misaligned address; no interpreter tells."""
    moved = []

    def checked(copy, part):
        def checking(*arguments, **options):
            moved.append(arguments[part])
            return copy(*arguments, **options)

        return checking

    for name, part in (("copy_gmem_to_smem", 1), ("copy_smem_to_gmem", 0)):
        monkeypatch.setattr(plgpu, name, checked(getattr(plgpu, name), part))
    for kernel, arguments in traced_kernels(*SIZES[model]):
        moved.clear()
        jax.eval_shape(kernel, *arguments)
        assert moved
        assert all(math.prod(ref.shape) * ref.dtype.itemsize % 128 == 0 for ref in moved), kernel


def test_what_is_supported():
    for c, f in ((96, 384), (128, 512), (160, 640)):  # ViT-B, ViT-L, ViT-H
        assert norm.supported(c, jnp.float32) and residual.supported(f, c, jnp.bfloat16, jnp.float32)
        assert gelu.supported(c, f, jnp.bfloat16) and not gelu.supported(c, f, jnp.float32)
    assert all(heads.supported(c, n, jnp.bfloat16) for c, n in ((96, 12), (128, 16), (128, 8), (160, 16)))
    assert not norm.supported(48, jnp.float32)  # a warp holds 32 channels
    assert not heads.supported(64, 32, jnp.bfloat16)  # of two channels, no group is whole
    assert heads.supported(32, 4, jnp.bfloat16) and not heads.supported(32, 4, jnp.bfloat16, parts=1)  # two tiles
    assert norm_gradient.supported(160, jnp.float32, jnp.bfloat16)
    assert not norm_gradient.supported(160, jnp.float32, jnp.float16)
    assert not gelu.supported(208, 1024, jnp.bfloat16)  # ViT-G: shared memory does not hold 64 rows
    assert not heads.supported(208, 16, jnp.bfloat16) and not heads.supported(96, 8, jnp.bfloat16)  # 13 and 12 channels
    for c in (96, 128, 160):  # a register of a thread holds what a tile needs, and shared memory what is staged
        assert residual.default_tile(4 * c, c, jnp.float32).slots >= 4 and gelu.default_ring(c).slots >= 3
