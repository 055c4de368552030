"""Which implementation runs where, and the operations under transformations and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit import kernels, models
from equivit.kernels import dispatch
from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.octic_linear_gelu import octic_linear_gelu
from experiments.benchmarks.field_shapes import Shape
from tests.kernels.comparison import assert_near, draw_arguments

SHAPE = Shape("small", (8,), 5, 8, 8)
MESHES = [(4, 2), (2, 4)]
BATCH = PartitionSpec(None, ("data", "fsdp"))
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["interpret", "auto"])
# Sums of squares of values near 10, and of three such in turn: of size 100, rounded in steps of 1e-5.
GRADIENTS = 1e-4


def mesh_of(shape, kind=AxisType.Auto, names=("data", "fsdp")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


# The operations as functions of a field and weights, [4, B, N, C] -> [4, B, N, C], so that they can follow each other.


def gelu(implementation, field, weights):
    return d8_gelu(*field, implementation=implementation)


def linear_gelu(implementation, field, weights):
    return octic_linear_gelu(*field, *weights, implementation=implementation)


OPS = pytest.mark.parametrize("op", [gelu, linear_gelu], ids=["d8_gelu", "octic_linear_gelu"])


def arguments():
    arrays = draw_arguments(SHAPE, "float32")
    return arrays[:2], arrays[2:]


def loss(op, field, weights):
    return sum(jnp.square(y).sum() for y in op(field, weights))


def gradients(op):
    return jax.grad(functools.partial(loss, op), argnums=(0, 1))


def in_scan(op):
    def three(field, weights):
        step = jax.checkpoint(lambda field, _: (op(field, weights), None))
        return jax.lax.scan(step, field, None, length=3)[0]

    return three


def values_and_gradients(op, implementation):
    """A function of the values of three in turn, and their gradients."""
    op = in_scan(functools.partial(op, implementation))
    return lambda field, weights: (op(field, weights), gradients(op)(field, weights))


@functools.cache
def both_on_a_device(op, implementation):
    """`values_and_gradients` of the arguments, without a mesh."""
    return jax.jit(values_and_gradients(op, implementation))(*arguments())


def over_batch(op):
    return jax.vmap(op, in_axes=(1, None), out_axes=1)


@OPS
@IMPLEMENTATIONS
def test_transformations_change_nothing(op, implementation):
    field, weights = arguments()
    plain, op = functools.partial(op, "xla"), functools.partial(op, implementation)
    values, slopes = jax.jit(lambda *a: (plain(*a), jax.tree.leaves(gradients(plain)(*a))))(field, weights)

    @jax.jit  # one program, which compiles sooner than many
    def transformed(field, weights):
        twice = jax.vmap(over_batch(op), in_axes=(2, None), out_axes=2)
        twice = [y[:, :, :, 0] for y in twice([a[:, :, :, None] for a in field], weights)]
        each = jax.vmap(gradients(op), in_axes=(1, None), out_axes=(1, 0))
        field_slopes, weight_slopes = each(field, weights)  # of the weights, one for each example
        all_slopes = [gradients(f)(field, weights) for f in (op, over_batch(op))]
        all_slopes.append((field_slopes, [a.sum(0) for a in weight_slopes]))
        return [over_batch(op)(field, weights), twice], [jax.tree.leaves(s) for s in all_slopes]

    found_values, found_slopes = transformed(field, weights)
    for found in (op(field, weights), *found_values):  # the first outside of jit
        assert_near(found, values, 2e-5)
    for found in found_slopes:
        assert_near(found, slopes, GRADIENTS)


@OPS
@IMPLEMENTATIONS
def test_in_a_scan_with_remat(op, implementation):
    found, expected = (both_on_a_device(op, name) for name in (implementation, "xla"))
    assert_near(jax.tree.leaves(found), jax.tree.leaves(expected), GRADIENTS)


@OPS
@IMPLEMENTATIONS
def test_eight_devices_equal_lines(op, implementation):
    (field, weights), both = arguments(), values_and_gradients(op, implementation)
    expected, mesh = both_on_a_device(op, implementation), mesh_of(MESHES[0])
    with jax.set_mesh(mesh):
        assert "shard_map" in str(jax.make_jaxpr(both)(field, weights))
        shardings = NamedSharding(mesh, BATCH), NamedSharding(mesh, PartitionSpec())
        found = jax.jit(both, in_shardings=shardings)(field, weights)
        assert found[0][0].sharding.spec == BATCH or implementation == "auto"  # plain XLA chooses itself
        assert_near(jax.tree.leaves(found), jax.tree.leaves(expected), GRADIENTS)


@OPS
def test_a_batch_that_the_mesh_does_not_divide(op):
    field, weights = arguments()
    field = [a[:, :6] for a in field]
    expected = op("xla", field, weights)
    with jax.set_mesh(mesh_of((4, 2))):
        assert_near(jax.jit(functools.partial(op, "interpret"))(field, weights), expected)


@OPS
def test_a_program_for_any_batch_is_plain(op):
    field, weights = arguments()
    (batch,) = jax.export.symbolic_shape("b")
    of_any = [jax.ShapeDtypeStruct((len(a), batch, *a.shape[2:]), a.dtype) for a in field]
    exported = jax.export.export(jax.jit(functools.partial(op, "auto")), platforms=("cpu",))(of_any, list(weights))
    assert_near(exported.call(list(field), list(weights)), op("xla", field, weights))


# A toy operation that tells which implementation ran: plain leaves the field, the kernel adds 1 to it.


def toy(implementation, *fields, weights=(), kernel=lambda x, *weights: (x + 1,)):
    kernels = {"tpu": kernel, "gpu": kernel, "interpret": kernel}
    return dispatch.run("toy", implementation, lambda x, *weights: (x,), kernels, fields, weights)[0]


def test_auto_on_a_cpu_is_plain_and_a_name_insists():
    x = jnp.zeros((4, 8, 5, 3))
    assert float(toy("auto", x).max()) == 0
    assert float(toy("interpret", x).min()) == 1
    with pytest.raises(ValueError, match=r"toy: implementation='tpu' has no kernel for float32\[4, 8, 5, 3\]; 'auto'"):
        toy("tpu", x, kernel=None)
    assert float(toy("auto", x, kernel=None).max()) == 0


def test_vmap_gives_the_kernel_lines_larger_batch():
    seen = []

    def kernel(x):
        seen.append(x.shape)
        return (x + 1,)

    x = jnp.zeros((7, 4, 6, 5, 3))
    found = jax.vmap(lambda x: toy("interpret", x, kernel=kernel))(x)
    assert found.shape == x.shape
    assert float(found.min()) == 1
    assert seen[-1] == (4, 7, 6, 5, 3)
    each = jax.vmap(lambda x, w: toy("interpret", x, weights=(w,)))(x, jnp.ones((7, 2)))
    assert float(each.max()) == 0  # weights of each example's own: no kernel for that


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_each_device_runs_the_kernel_on_its_part(shape):
    seen = []

    def kernel(x):
        seen.append(x.shape)
        return (x + 1,)

    with jax.set_mesh(mesh_of(shape)):
        x = jnp.zeros((4, 2, 16, 5, 3))
        assert float(jax.jit(lambda x: toy("interpret", x, kernel=kernel))(x).min()) == 1
        assert seen[-1] == (4, 2, 2, 5, 3)


def test_plain_where_a_mesh_cannot_split_the_batch():
    x = jnp.zeros((4, 8, 5, 3))
    run = jax.jit(functools.partial(toy, "interpret"))
    with jax.set_mesh(mesh_of((4, 2))):
        assert float(run(x).min()) == 1
        assert float(run(x[:, :4]).max()) == 0  # does not divide
        assert float(run(x[:, 0]).max()) == 0  # the axis before the tokens counts irreps
        assert run(x[:, :0]).shape == (4, 0, 5, 3)
    with jax.set_mesh(mesh_of((2, 2, 2), names=("data", "fsdp", "other"))):
        assert float(run(x).min()) == 1
    with jax.set_mesh(mesh_of((8,), names=("other",))):
        assert float(run(x).max()) == 0
    with jax.set_mesh(mesh_of((4, 2), AxisType.Explicit)):
        assert float(run(x).max()) == 0
    with jax.set_mesh(mesh_of((1, 1))):
        assert float(run(x[:, :3]).min()) == 1


@pytest.mark.parametrize("manual", [("data", "fsdp"), ("data",)], ids=str)
def test_inside_a_shard_map_only_the_axes_left_are_split(manual):
    with jax.set_mesh(mesh_of((4, 2))):
        spec = PartitionSpec(None, manual)
        for check, expected in ((False, 1), (True, 0)):  # what varies over which axes, kernels do not tell
            run = jax.shard_map(
                functools.partial(toy, "interpret"),
                in_specs=spec,
                out_specs=spec,
                axis_names=set(manual),
                check_vma=check,
            )
            np.testing.assert_array_equal(jax.jit(run)(jnp.zeros((4, 8, 5, 3))), expected)


@pytest.mark.slow
def test_a_whole_model_with_one_implementation():
    """With "xla" a model is exported for two platforms at once and for any batch, which Pallas does not allow."""
    options = dict(family="D8", width=16, num_heads=2, depth=1, patch_size=4, image_size=(16, 16), num_classes=3)
    model = models.create("octic_vit_ti16", **options)
    (batch,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((batch, 16, 16, 3), jnp.float32)
    with kernels.using("xla"):
        exported = jax.export.export(jax.jit(lambda images: model(images)), platforms=("cpu", "cuda"))(images)
        assert dispatch.resolve("op", "auto") == "xla" and dispatch.resolve("op", "tpu") == "tpu"
    assert exported.platforms == ("cpu", "cuda") and dispatch.resolve("op", "auto") == "auto"
    x = jax.random.normal(jax.random.key(0), (3, 16, 16, 3))
    np.testing.assert_allclose(exported.call(x), jax.jit(lambda x: model(x))(x), atol=1e-5)
    with pytest.raises(ValueError, match="kernels.using: implementation='xl' is not one of 'auto', 'reference', 'xla'"):
        kernels.using("xl").__enter__()
