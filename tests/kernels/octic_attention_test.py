"""A whole attention branch in one operation: the TPU kernel in interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit import kernels
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import Weights, octic_attention
from equivit.kernels.octic_branch.tpu import MAPS
from equivit.kernels.octic_branch.tpu_attention import supported
from experiments.benchmarks.field_shapes import Shape
from tests.kernels.comparison import assert_near, draw, value_and_gradient, widen

NORM = Norm(1e-5, 0.5)
SMALL = (2, 37, 16, (3,))  # heads, tokens, channels, batch: two heads of 64 share a register


@functools.partial(jax.jit, static_argnames=("heads", "implementation", "norm"))
def branch(lines, planes, *weights, heads=2, implementation="interpret", norm=NORM):
    return octic_attention(lines, planes, Weights(*weights), heads, norm, implementation=implementation)


reference = functools.partial(branch, implementation="xla")


def draw_branch(tokens, c, batch, dtype="float32", seed=0):
    """Logits of deviation 2 or so, and a branch as large as its input."""
    deviations = (1, 1, 1, c**-0.5, (2 * c) ** -0.5, 1, c**-0.5, (2 * c) ** -0.5, 1, 1, 1)
    weights = draw(Shape("branch", batch, tokens, c, 0).attention_branch(), "float32", seed + 1, 1.0)
    weights = [
        jax.device_put((np.asarray(w) * d).astype(jnp.dtype(dtype))) for w, d in zip(weights, deviations, strict=True)
    ]
    return (*draw([(4, *batch, tokens, c), (2, *batch, tokens, 2 * c)], dtype, seed), *weights)


@pytest.mark.parametrize(
    "heads, tokens, c, batch",
    [
        pytest.param(*SMALL, id="two heads in a register"),
        pytest.param(2, 129, 20, (), id="heads of 80, a last key apart"),
        pytest.param(4, 16, 40, (1, 2), id="four heads of 80"),
        pytest.param(16, 5, 160, (), id="sixteen heads of 80, in blocks that rows exchange"),
    ],
)
def test_values_are_the_reference_s(heads, tokens, c, batch):
    """Sums of up to 320 products in another order: 7e-6 of values near 15 are measured."""
    arrays = draw_branch(tokens, c, batch)
    assert_near(branch(*arrays, heads=heads), reference(*arrays, heads=heads), absolute=2e-5)


@pytest.mark.parametrize(
    "shape, field",
    [
        pytest.param(SMALL, "bfloat16", id="bfloat16"),
        pytest.param(SMALL, "float32", id="mixed"),
        pytest.param((16, 128, 160, ()), "bfloat16", id="products turned"),
    ],
)
def test_products_in_bfloat16_lose_less_than_plain_xla_s(shape, field):
    """Both round the factors of the products, and the kernel less of what is in between."""
    lines, planes, *weights = draw_branch(*shape[1:], field)
    w = Weights(*weights)
    w = w._replace(**{name: getattr(w, name).astype(jnp.bfloat16) for name in MAPS})
    arrays = (lines, planes, *w)
    runs = (branch, arrays), (reference, arrays), (reference, widen(arrays))
    for ours, plain, truth in zip(*(f(*a, heads=shape[0]) for f, a in runs), strict=True):
        assert ours.dtype == plain.dtype == field
        ours, plain = (np.asarray(y, np.float32) - truth for y in (ours, plain))
        assert 0 < np.square(ours).mean() <= np.square(plain).mean()


def test_gradients_are_the_reference_s():
    """They are those of the branch in parts, with the kernels of attention."""
    arrays = draw_branch(*SMALL[1:])
    gradient = draw_branch(*SMALL[1:], seed=9)[:2]
    expected = value_and_gradient(reference, arrays, gradient)
    for a, b in zip(value_and_gradient(branch, arrays, gradient), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=4e-6 * float(jnp.abs(b).max()), rtol=0)  # sums over 111 rows


def test_a_parameter_in_the_wrong_place_is_caught():
    lines, planes, *weights = draw_branch(*SMALL[1:])
    results = [np.asarray(y) for y in branch(lines, planes, *weights)]
    w = Weights(*map(np.asarray, weights))
    wrong = {
        "irreps of the norm": w._replace(norm_lines=w.norm_lines[::-1]),
        "bias of the norm": w._replace(norm_bias=0 * w.norm_bias),
        "first bias": w._replace(first_bias=0 * w.first_bias),
        "second bias": w._replace(second_bias=0 * w.second_bias),
        "heads": w._replace(first_lines=np.roll(w.first_lines, 8, axis=-1)),
        "copies of E": w._replace(second_planes=np.roll(w.second_planes, 16, axis=1)),
        "irreps of the second map": w._replace(second_lines=w.second_lines[::-1]),
        "irreps of the layer scale": w._replace(scale_lines=w.scale_lines[::-1]),
        "copies of the layer scale": w._replace(scale_planes=w.scale_planes[::-1]),
    }
    for name, other in wrong.items():
        found = reference(lines, planes, *other)
        assert max(np.abs(a - b).max() for a, b in zip(results, found, strict=True)) > 0.1, name
    found = reference(lines, planes, *weights, norm=Norm(1e-5, 2.0))
    assert np.abs(results[0] - found[0]).max() > 0.1, "weight of E in the norm"


def test_eight_devices_equal_one():
    arrays = draw_branch(5, 16, (8,))
    expected = reference(*arrays)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    batch, whole = (NamedSharding(mesh, p) for p in (PartitionSpec(None, ("data", "fsdp")), PartitionSpec()))
    with jax.set_mesh(mesh):
        assert "shard_map" in str(branch.trace(*arrays).jaxpr)
        found = jax.jit(branch, in_shardings=(batch,) * 2 + (whole,) * len(Weights._fields))(*arrays)
        assert found[0].sharding.spec == PartitionSpec(None, ("data", "fsdp"))
        assert_near(found, expected, absolute=2e-5)


@pytest.mark.parametrize("tokens, fits", [(304, True), (320, False)])
def test_images_of_vit_h_that_the_kernel_holds(tokens, fits):
    shape = Shape("ViT-H", (8,), tokens, 160, 0)
    lines, *_, weights = *shape.field(160), shape.attention_branch()
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    assert supported(abstract(lines), Weights(*map(abstract, weights)), 16, NORM) == fits


def test_shapes_without_a_kernel():
    """A name insists; under `using` the branch consists of several operations."""
    arrays = draw_branch(5, 24, (2,))  # a head of 192
    with pytest.raises(ValueError, match="octic_attention: implementation='interpret' has no kernel for float32"):
        jax.eval_shape(functools.partial(branch, heads=1), *arrays)
    with kernels.using("interpret"):
        traced = jax.jit(functools.partial(branch, implementation="auto", heads=1)).trace(*arrays)
    assert "name=octic_attention" not in str(traced.jaxpr)
    assert_near(traced.lower().compile()(*arrays), reference(*arrays, heads=1), absolute=1e-5)


def test_a_tpu_has_the_kernel_and_its_gradient_those_of_attention():
    shape = Shape("enough tokens", (8,), 128, 16, 0)
    sizes = *shape.field(16), *shape.attention_branch()
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    on_tpu = functools.partial(branch, implementation="tpu")

    def gradient(*arrays):
        return jax.grad(lambda *a: sum(jnp.square(y.astype(jnp.float32)).sum() for y in on_tpu(*a)))(*arrays)

    for function, names in ((on_tpu, ["octic_attention"]), (gradient, ["attention", "attention_backward"])):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert [name for name in names if f'kernel_name = "{name}"' in text] == names
    auto = functools.partial(branch, implementation="auto")
    assert "kernel_name" not in jax.jit(auto).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


def test_bad_arguments_are_named():
    lines, planes, *weights = draw_branch(*SMALL[1:])
    w = Weights(*weights)
    with pytest.raises(ValueError, match="octic_attention: implementation='fast' is not one of 'auto', 'reference'"):
        octic_attention(lines, planes, w, 2, NORM, implementation="fast")
    with pytest.raises(ValueError, match=r"octic_attention: second_lines \(4, 16, 48\) must be \(4, 16, 16\), .* C=16"):
        octic_attention(lines, planes, w._replace(second_lines=w.first_lines), 2, NORM)
