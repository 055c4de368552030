"""Lowering for TPU and GPU on a machine that has neither: the program holds the kernels, and only where asked for."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit import kernels
from equivit.kernels import dispatch, gpus, norm
from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import Weights, octic_mlp
from equivit.kernels.octic_linear_gelu import octic_linear_gelu
from experiments.benchmarks.field_shapes import AWKWARD, REALISTIC, Shape

pytestmark = pytest.mark.slow

SMALL = Shape("small", (8,), 40, 16, 64)
WHOLE = Shape("hidden channels in whole tiles", (8,), 37, 16, 256)
ACCELERATORS = pytest.mark.parametrize("platform", ["tpu", "cuda"])
TYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
NAMES = GELU, BACKWARD, LINEAR, BRANCH = "d8_gelu", "d8_gelu_backward", "octic_linear_gelu", "octic_mlp"


def first_map(platform, dtype) -> list[str]:
    """The kernels of an MLP's first map in a forward pass: the one for GPUs is for bfloat16."""
    return [LINEAR] if platform == "tpu" or dtype == "bfloat16" else [GELU]


def kernels_in(function, platform, *arguments, implementation=None) -> list[str]:
    """Names of the kernels in the program lowered for a platform, sorted, as often as they are called.

    Those for a TPU are asked for; the others "auto" takes.
    """
    with kernels.using(implementation or ("tpu" if platform == "tpu" else "auto")):
        traced = jax.jit(lambda *arrays: function(*arrays)).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @tpu_" in line or "custom_call @mosaic_gpu" in line]
    # A TPU's call has the name as an attribute; in a GPU's bytecode the name stands between two zeros.
    names = [[n for n in NAMES if f'kernel_name = "{n}"' in c or rf"\00{n}_mosaic_gpu\00" in c] for c in calls]
    assert all(len(found) == 1 for found in names), names
    return sorted(name for (name,) in names)


def abstract(shapes, dtype):
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def gelu_arguments(shape, dtype):
    return abstract(shape.field(shape.hidden), dtype)


def linear_arguments(shape, dtype):
    return abstract((*shape.field(shape.channels), *shape.weights()), dtype)


def branch(lines, planes, *weights):
    return octic_mlp(lines, planes, Weights(*weights), Norm(1e-5, 0.5))


def branch_arguments(shape, dtype, other=None):
    """With `other` in place of `dtype` outside of the products."""
    other = other or dtype
    types = [other] * 5 + [dtype, dtype, other] * 2 + [other] * 2
    shapes = [*shape.field(shape.channels), *shape.mlp_branch()]
    return tuple(jax.ShapeDtypeStruct(size, kind) for size, kind in zip(shapes, types, strict=True))


def gradient(op):
    def loss(*arrays):
        return sum(jnp.square(y.astype(jnp.float32)).sum() for y in op(*arrays))

    return lambda *arrays: jax.grad(loss, argnums=tuple(range(len(arrays))))(*arrays)


def in_scan(lines, planes):
    return jax.lax.scan(jax.checkpoint(lambda field, _: (d8_gelu(*field), None)), (lines, planes), None, length=3)[0]


@ACCELERATORS
@TYPES
def test_forward_and_gradient_hold_the_kernels(platform, dtype):
    field, arrays = gelu_arguments(SMALL, dtype), linear_arguments(SMALL, dtype)
    assert kernels_in(d8_gelu, platform, *field) == [GELU]
    assert kernels_in(gradient(d8_gelu), platform, *field) == [GELU, BACKWARD]
    assert kernels_in(octic_linear_gelu, platform, *arrays) == first_map(platform, dtype)
    assert kernels_in(gradient(octic_linear_gelu), platform, *arrays) == [GELU, BACKWARD]


@ACCELERATORS
def test_so_do_a_scan_and_vmap(platform):
    field = gelu_arguments(SMALL, "bfloat16")
    assert kernels_in(in_scan, platform, *field) == [GELU]
    assert kernels_in(gradient(in_scan), platform, *field).count(BACKWARD) == 1
    assert kernels_in(jax.vmap(d8_gelu, in_axes=1, out_axes=1), platform, *field) == [GELU]


@ACCELERATORS
def test_so_does_a_mesh(platform):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    batch, whole = (NamedSharding(mesh, p) for p in (PartitionSpec(None, ("data", "fsdp")), PartitionSpec()))
    with jax.set_mesh(mesh):
        field = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=batch) for a in gelu_arguments(SMALL, "bfloat16")]
        assert set(kernels_in(gradient(in_scan), platform, *field)) == {GELU, BACKWARD}
        arrays = linear_arguments(SMALL, "bfloat16")
        arrays = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole if i > 1 else batch) for i, a in enumerate(arrays)
        ]
        assert kernels_in(octic_linear_gelu, platform, *arrays) == [LINEAR]
        assert kernels_in(gradient(octic_linear_gelu), platform, *arrays) == [GELU, BACKWARD]


@ACCELERATORS
def test_so_does_a_program_with_64_bit_types_enabled(platform):
    """As in experiments that compare types: a field of float32 still has the kernel, one of float64 has none."""
    with jax.enable_x64(True):
        for dtype, kernels in (("float32", [GELU]), ("float64", [])):
            assert kernels_in(d8_gelu, platform, *gelu_arguments(SMALL, dtype)) == kernels
        assert kernels_in(octic_linear_gelu, platform, *linear_arguments(SMALL, "float32")) == first_map(
            platform, "float32"
        )


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_xla_holds_none_and_neither_does_a_cpu(platform):
    implementation = "auto" if platform == "cpu" else "xla"
    for op, arrays in ((d8_gelu, gelu_arguments), (octic_linear_gelu, linear_arguments)):
        op = functools.partial(op, implementation=implementation)
        assert kernels_in(gradient(op), platform, *arrays(SMALL, "bfloat16")) == []


def test_auto_holds_no_kernel_that_has_yet_to_run():
    for op, arrays in ((d8_gelu, gelu_arguments), (octic_linear_gelu, linear_arguments)):
        assert kernels_in(gradient(op), "tpu", *arrays(SMALL, "bfloat16"), implementation="auto") == []
    assert kernels_in(branch, "tpu", *branch_arguments(WHOLE, "bfloat16"), implementation="auto") == []


def test_the_name_of_a_platform_insists():
    arrays = linear_arguments(SMALL, "bfloat16")
    assert kernels_in(functools.partial(octic_linear_gelu, implementation="tpu"), "tpu", *arrays) == [LINEAR]
    assert kernels_in(functools.partial(octic_linear_gelu, implementation="gpu"), "cuda", *arrays) == [LINEAR]


# On a GPU, class tokens are a few rows more; the narrowest and the widest model are in `gpu_interpreter_test`.
MODELS = [(shape, "tpu") for shape in REALISTIC]
MODELS += [(shape, "cuda") for shape in REALISTIC[1:-1] if "token" not in shape.name]


@pytest.mark.parametrize("shape, platform", MODELS, ids=lambda value: getattr(value, "name", value))
def test_every_model_lowers_with_kernels(shape, platform):
    both = gradient(d8_gelu)
    assert kernels_in(both, platform, *gelu_arguments(shape, "bfloat16")) == [GELU, BACKWARD]
    fused = [GELU] if (shape.name, platform) == ("ViT-22B", "tpu") else [LINEAR]  # its weights are beyond VMEM
    assert kernels_in(octic_linear_gelu, platform, *linear_arguments(shape, "bfloat16")) == fused


@ACCELERATORS
@TYPES
def test_what_kernels_do_not_support_lowers_without(platform, dtype):
    for shape in AWKWARD:
        for op, arrays in ((d8_gelu, gelu_arguments), (octic_linear_gelu, linear_arguments)):
            found = kernels_in(op, platform, *arrays(shape, dtype))
            assert found or platform == "cuda" and shape.hidden * jnp.dtype(dtype).itemsize % 16
    assert kernels_in(gradient(octic_linear_gelu), platform, *linear_arguments(SMALL, "float16")) == []


def test_a_gpu_that_is_no_hopper_has_none_unless_asked(monkeypatch):
    field = gelu_arguments(Shape("of this test alone: what is traced is kept", (8,), 41, 16, 64), "bfloat16")
    monkeypatch.setattr(dispatch, "hopper", lambda: False)
    assert kernels_in(d8_gelu, "cuda", *field) == [] and kernels_in(d8_gelu, "tpu", *field) == [GELU]
    assert kernels_in(functools.partial(d8_gelu, implementation="gpu"), "cuda", *field) == [GELU]


def test_a_described_gpu_decides_in_place_of_the_machine():
    """The same function before, inside and after the context: it is traced for each."""
    field = gelu_arguments(SMALL, "bfloat16")
    assert kernels_in(d8_gelu, "cuda", *field) == [GELU]
    with gpus.lowering_for(gpus.Gpu("8.0", 91000)):
        assert kernels_in(d8_gelu, "cuda", *field) == []
    with gpus.lowering_for(gpus.Gpu("9.0", 91000)):
        assert kernels_in(d8_gelu, "cuda", *field) == [GELU]
    assert kernels_in(d8_gelu, "cuda", *field) == [GELU]


def test_under_using_it_decides_too_and_the_name_of_a_platform_insists():
    with gpus.lowering_for(gpus.Gpu("8.0", 91000)):
        for op, arrays, name in ((d8_gelu, gelu_arguments, GELU), (octic_linear_gelu, linear_arguments, LINEAR)):
            arrays = arrays(SMALL, "bfloat16")
            assert kernels_in(op, "cuda", *arrays, implementation="gpu") == []
            assert kernels_in(functools.partial(op, implementation="gpu"), "cuda", *arrays) == [name]


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
@pytest.mark.parametrize("arrays", [1, 2])
def test_a_gpu_computes_the_deviation_of_lines_and_planes_once(platform, arrays):
    lines, planes, scales = jnp.ones((4, 2, 5, 8)), jnp.ones((2, 2, 5, 16)), (jnp.ones((4, 8)), jnp.ones(16))
    normalise = functools.partial(norm.normalise, norm=Norm(1e-5, 0.5))
    lowered = jax.jit(normalise).trace((lines, planes)[:arrays], scales[:arrays], jnp.zeros(8))
    text = lowered.lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in text) == (platform == "cuda" and arrays == 2)


@pytest.mark.parametrize("dtype, other", [("float32", None), ("bfloat16", None), ("bfloat16", "float32")])
def test_a_branch_is_one_kernel(dtype, other):
    assert kernels_in(branch, "tpu", *branch_arguments(WHOLE, dtype, other)) == [BRANCH]


def test_unless_it_is_differentiated_or_on_another_platform():
    arrays = branch_arguments(WHOLE, "float32")
    assert kernels_in(branch, "cuda", *arrays) == [GELU] and kernels_in(branch, "cpu", *arrays) == []
    for platform in ("tpu", "cuda"):
        assert kernels_in(gradient(branch), platform, *arrays) == [GELU, BACKWARD]
    with jax.enable_x64(True):
        assert kernels_in(branch, "tpu", *arrays) == [BRANCH]


@pytest.mark.parametrize("shape", REALISTIC, ids=lambda shape: shape.name)
def test_which_models_have_the_branch(shape):
    found = kernels_in(branch, "tpu", *branch_arguments(shape, "bfloat16"))
    other = {"ViT-S": [LINEAR], "ViT-e": [LINEAR], "ViT-22B": [GELU]}  # half a tile is empty; too large, twice
    assert found == other.get(shape.name, [BRANCH])


def test_a_branch_on_a_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    batch, whole = (NamedSharding(mesh, p) for p in (PartitionSpec(None, ("data", "fsdp")), PartitionSpec()))
    with jax.set_mesh(mesh):
        arrays = enumerate(branch_arguments(WHOLE, "bfloat16"))
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole if i > 1 else batch) for i, a in arrays]
        assert kernels_in(branch, "tpu", *arrays) == [BRANCH]
