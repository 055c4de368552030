"""Products: values and derivatives, and on a CPU the types and orders of which XLA has a fast form."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from equivit import kernels
from equivit.kernels.product import bilinear, einsum, named_product
from equivit.layers import dense, isotypic
from equivit.layers.rngs import Keys
from equivit.layers.stack import REMAT
from equivit.precision import cast
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

SCORES, WEIGHTED = "...nd,...md->...nm", "...nm,...md->...nd"
matmul = functools.partial(einsum, "...c,cd->...d")
RNG = np.random.default_rng(0)
ROUNDED = dict(rtol=2**-7, atol=2**-7)  # of the result, and of the cotangent that it is derived from
CASES = {  # axes: the shapes of the factors
    "nc,cd->nd": ((5, 7), (7, 3)),
    "bnc,cd->bnd": ((2, 5, 7), (7, 3)),
    "ibnc,icd->ibnd": ((4, 2, 5, 7), (4, 7, 3)),
    "bhnd,bhmd->bhnm": ((2, 3, 5, 7), (2, 3, 4, 7)),
    "bnd,md->bnm": ((2, 5, 7), (3, 7)),
}
cases = pytest.mark.parametrize(("axes", "shapes"), CASES.items(), ids=CASES)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)


def exact(axes, x, y):
    """The definition, in float32."""
    x, y = (a.astype(jnp.float32) for a in (x, y))
    return jnp.einsum(axes, x, y, precision="highest")


def derivatives(product, x, y, dz):
    """The value, a forward derivative, both gradients, and these for two cotangents at once and for two y at once."""

    def pull(y, dz):
        z, pull = jax.vjp(product, x, y)
        return z, pull(dz.astype(z.dtype))

    forward = jax.jvp(product, (x, y), (x / 2, y / 4))
    by_cotangent = jax.vmap(pull, (None, -1))(y, jnp.stack([dz, dz / 2], -1))
    return forward, pull(y, dz), by_cotangent, jax.vmap(pull, (1, None))(jnp.stack([y, 2 * y], 1), dz)


@cases
def test_values_and_derivatives_are_those_of_a_product(axes, shapes):
    x, y = (normal(*shape) for shape in shapes)
    dz = normal(*jax.eval_shape(functools.partial(exact, axes), x, y).shape)
    found, known = (
        jax.jit(functools.partial(derivatives, functools.partial(product, axes)))(x, y, dz)
        for product in (einsum, exact)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    chex.assert_trees_all_close(*(jax.tree.map(np.float32, tree) for tree in (found, known)), **ROUNDED)


@cases
def test_outside_of_jit_it_is_the_same(axes, shapes):
    x, y = (normal(*shape) for shape in shapes)
    chex.assert_trees_all_equal(einsum(axes, x, y), jax.jit(functools.partial(einsum, axes))(x, y))


@pytest.mark.parametrize("channels", [1, 2, 64])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (3, 1), (2, 5), (1, 2, 3)], ids=str)
def test_small_products_run(rows, channels):
    """XLA:CPU has no code for some products of bfloat16 that its compiler lets pass."""
    x, weight = normal(*rows, channels), normal(channels, 3)
    product = functools.partial(einsum, "...c,cd->...d")

    def all_of(product, x, weight):
        z, pull = jax.vjp(product, x, weight)
        return z, pull(jnp.ones_like(z))

    found = jax.jit(functools.partial(all_of, product))(x, weight)
    known = all_of(jnp.matmul, x.astype(jnp.float32), weight.astype(jnp.float32))
    chex.assert_trees_all_close(jax.tree.map(np.float32, found), known, **ROUNDED)


@pytest.mark.parametrize("batch", [(2,), (1, 3), (4, 2, 3)], ids=str)
@pytest.mark.parametrize("axes", [SCORES, WEIGHTED])
@pytest.mark.parametrize("by_cotangent", [False, True])
def test_products_of_transposed_factors_run(axes, batch, by_cotangent):
    """As heads are that a linear map has side by side.  Here as well, XLA:CPU has no code for some products."""
    sizes = dict(n=5, m=4, d=8)
    shapes = ((*batch, *(sizes[a] for a in part[3:])) for part in axes.split("->")[0].split(","))
    x, y = (jnp.swapaxes(normal(*shape), -1, -2) for shape in shapes)
    product, known_product = (functools.partial(form, axes) for form in (einsum, jnp.einsum))

    def turned(product, x, y):
        return product(jnp.swapaxes(x, -1, -2), jnp.swapaxes(y, -1, -2)).swapaxes(0, -1)

    def all_of(product, x, y, dz):
        z, pull = jax.vjp(functools.partial(turned, product), x, y)
        return z, jax.vmap(pull, -1)(dz) if by_cotangent else pull(dz[..., 0])

    dz = normal(*jax.eval_shape(functools.partial(turned, known_product), x, y).shape, 2)
    found = jax.jit(functools.partial(all_of, product))(x, y, dz)
    known = all_of(known_product, *(a.astype(jnp.float32) for a in (x, y, dz)))
    chex.assert_trees_all_close(jax.tree.map(np.float32, found), known, **ROUNDED)


def attention(q, k, v):
    return jnp.sum(einsum(WEIGHTED, jnp.exp(einsum(SCORES, q, k)), v).astype(jnp.float32) ** 2)


def test_the_factors_of_attention_are_in_order_on_one_cpu():
    shape = jax.ShapeDtypeStruct((2, 3, 5, 8), jnp.bfloat16)
    trace = jax.jit(jax.grad(attention, (0, 1, 2))).trace(*(shape,) * 3)

    def products(platform):
        lines = trace.lower(lowering_platforms=(platform,)).as_text().splitlines()
        found = [line.split(" : ")[-1] for line in lines if "stablehlo.dot_general" in line]
        return found, sum("LayoutConstraint" in line for line in lines)

    found, in_order = products("cpu")
    assert len(found) == 6 and in_order == 12
    assert all(line.count("xbf16>") == 2 for line in found), found
    assert [products(platform)[1] for platform in ("tpu", "cuda")] == [0, 0]


@pytest.mark.parametrize("channels", [(7, 3), (3, 7)])
def test_the_gradient_of_a_weight_has_more_columns_than_rows_on_one_cpu(channels):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 5, channels[0]), channels))
    trace = jax.jit(jax.grad(lambda weight, x: matmul(x, weight).astype(jnp.float32).sum())).trace(weight, x)
    (result,) = re.findall(r"dot_general.* -> tensor<(\w+)x", trace.lower(lowering_platforms=("cpu",)).as_text())
    assert result == "3x7"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_over_several_devices_nothing_is_gathered_and_a_program_can_be_exported(dtype):
    """XLA gathers factors whose order is prescribed from all devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    over = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    gradient = jax.jit(jax.grad(attention, (0, 1, 2)))
    shape = jax.ShapeDtypeStruct((4, 3, 5, 8), dtype, sharding=over)
    assert "all-gather" not in gradient.lower(*(shape,) * 3).compile().as_text()
    jax.export.export(gradient, platforms=["cpu"])(*(jax.ShapeDtypeStruct(shape.shape, dtype),) * 3)


@pytest.mark.parametrize(
    ("platform", "types"), [("cpu", ("bf16", "bf16", "f32")), ("tpu", ("bf16",) * 3), ("cuda", ("bf16",) * 3)]
)
def test_each_product_of_a_gradient_has_the_types_that_are_fast(platform, types):
    def loss(x, y):
        return jnp.sum(einsum("...c,cd->...d", x, y).astype(jnp.float32) ** 2)

    shapes = jax.ShapeDtypeStruct((2, 5, 7), jnp.bfloat16), jax.ShapeDtypeStruct((7, 3), jnp.bfloat16)
    text = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform])(*shapes).mlir_module()
    products = [line.split(" : ")[-1] for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = {tuple(part.split("x")[-1].split(">")[0] for part in line.split("tensor<")[1:]) for line in products}
    assert len(products) == 3
    assert found == {types}


def test_a_gradient_within_shard_map_is_summed_over_the_devices():
    x, weight = normal(8, 4, 7), normal(7, 3)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def gradient(x, weight):
        return jax.grad(lambda weight: jnp.sum(einsum("...c,cd->...d", x, weight).astype(jnp.float32)))(weight)

    over = PartitionSpec("data"), PartitionSpec()
    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=over, out_specs=over[1]))(x, weight)
    # Each device rounds its part, and the sum of four is rounded after each addition.
    chex.assert_trees_all_close(np.float32(found), np.float32(gradient(x, weight)), rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("group", [None, OCTIC], ids=["dense", "octic"])
def test_the_gradient_of_a_bias_is_not_summed_in_bfloat16(group):
    """Rounded to bfloat16, the sum of 1001 ones is 1000."""
    linear = dense.Linear if group is None else functools.partial(isotypic.Linear, group=group)
    x = jnp.ones((1, 1001, 8))
    x = x if group is None else fields.from_dense(x, group)
    layer = cast(linear(8, 16, rngs=Keys(0)), "mixed")
    assert layer.bias[...].dtype == jnp.float32

    def loss(layer, x):
        return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(layer(x)))

    gradient = jax.grad(loss)(layer, x).bias[...]
    np.testing.assert_array_equal(gradient, np.full_like(gradient, 1001))


@pytest.mark.parametrize(("platform", "result"), [("cpu", "3x5x4xf32"), ("tpu", "3x5x4xbf16"), ("cuda", "3x5x4xbf16")])
def test_a_product_in_bfloat16_has_the_result_that_is_fast_and_is_the_same_number(platform, result):
    x, weight = normal(3, 5, 7), normal(7, 4)
    text = jax.export.export(jax.jit(matmul), platforms=[platform])(x, weight).mlir_module()
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert product.split("->")[-1].strip().startswith(f"tensor<{result}>"), product
    found = matmul(x, weight)
    assert found.dtype == jnp.bfloat16
    known = exact("bnc,cd->bnd", x, weight)
    chex.assert_trees_all_close(found.astype(np.float32), known, rtol=2**-8, atol=1e-6)  # rounded once, at the end


def test_in_other_types_and_as_the_reference_it_is_einsum():
    """Converters know no primitive of ours."""

    def primitives(dtype, implementation):
        x = jnp.ones((3, 5, 7), dtype)
        with kernels.using(implementation):
            return str(jax.make_jaxpr(functools.partial(einsum, "...c,cd->...d"))(x, x[0].T))

    assert "bilinear_product" in primitives(jnp.bfloat16, "auto")
    for dtype, implementation in ((jnp.float32, "auto"), (jnp.float16, "auto"), (jnp.bfloat16, "reference")):
        assert "bilinear_product" not in primitives(dtype, implementation)


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [("...c,cd->...d", ((3, 5, 7), (7, 4))), ("i...c,icd->i...d", ((4, 3, 5, 7), (4, 7, 2)))],
)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_all_but_a_tpu_sum_the_gradient_of_a_field_s_weight_over_one_axis(platform, axes, shapes):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    gradient = jax.jit(jax.grad(lambda weight, x: jnp.square(bilinear(axes, x, weight)).sum()))
    text = jax.export.export(gradient, platforms=[platform])(weight, x).mlir_module()
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    first = len(shapes[1]) - 2
    summed = [first] if platform != "tpu" else list(range(first, len(shapes[0]) - 1))
    assert len(found) == 2, found  # x is not differentiated
    assert sum(f"contracting_dims = {summed} x {summed}" in line for line in found) == 1, found


@pytest.mark.parametrize(("axes", "shapes"), CASES.items(), ids=CASES)
def test_the_primitive_in_float32(axes, shapes):
    x, y = (normal(*shape).astype(jnp.float32) for shape in shapes)
    dz = normal(*jax.eval_shape(functools.partial(exact, axes), x, y).shape).astype(jnp.float32)
    found, known = (
        jax.jit(functools.partial(derivatives, functools.partial(product, axes)))(x, y, dz)
        for product in (bilinear, exact)
    )
    chex.assert_trees_all_close(found, known, rtol=1e-5, atol=1e-5)  # sums of up to 30 products, in another order


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gradients_have_the_dtypes_of_their_factors(dtypes):
    x, y = (jnp.ones(shape, dtype) for shape, dtype in zip(((5, 7), (7, 7)), dtypes, strict=True))

    def loss(x, y):  # a scan takes no other dtype
        return jax.lax.scan(lambda x, y: (bilinear("nc,cd->nd", x, y).astype(x.dtype), None), x, y[None])[0].sum()

    assert [slope.dtype for slope in jax.grad(loss, (0, 1))(x, y)] == [x.dtype, y.dtype]


def test_the_precision_is_that_of_the_trace():
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    with jax.default_matmul_precision("highest"):
        traced = jax.jit(functools.partial(bilinear, "nc,mc->nm")).trace(x, x)
    assert "precision = [HIGHEST, HIGHEST]" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_remat_keeps_products_with_a_matrix(dtype):
    """By name: the policy of `remat="dots"` sees no primitive of ours."""
    x, weight = jnp.ones((3, 5, 7), dtype), jnp.ones((7, 4), dtype)

    def loss(x, weight):
        return jnp.sum(jnp.sin(named_product(matmul(x, weight))).astype(jnp.float32))

    pull = jax.vjp(jax.checkpoint(loss, policy=REMAT["dots"]), x, weight)[1]
    assert (3, 5, 4) in [leaf.shape for leaf in jax.tree.leaves(pull)]
