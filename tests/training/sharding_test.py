"""Parameters that are split over devices: what moves between the devices in a training step."""

import math
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit import kernels, logical
from equivit.layers.stack import used
from equivit.models import zoo
from equivit.precision import AtUse
from equivit.targets import collectives, program
from equivit.training import sharding
from tests.training import tiny


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("shape", "stacked", "split"),
    [
        ((6, 16, 40), 1, (None, None, ("hosts", "fsdp"))),
        ((8, 6, 20), 1, (None, "hosts", "fsdp")),  # 20 / 4, then 6 / 2
        ((4, 2, 6, 12, 2), 2, (None, None, "hosts", "fsdp")),
        ((2, 4, 3), 1, (None, "fsdp")),
        ((8, 3, 5), 1, ()),  # the axis of a stack stays whole
        ((8,), 1, ()),
        ((), 0, ()),
        ((0, 8), 0, ()),
    ],
)
def test_what_arrays_are_split_along(shape, stacked, split):
    mesh = mesh_of(data=1, hosts=2, fsdp=4)
    (found,) = sharding.of_tree(mesh, {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}, {"x": stacked}).values()
    assert found.spec == PartitionSpec(*split)


def test_without_hosts_one_axis_is_split():
    shapes = {"x": jax.ShapeDtypeStruct((6, 16, 40), jnp.float32), "y": jax.ShapeDtypeStruct((6, 20), jnp.float32)}
    found = sharding.of_tree(mesh_of(data=1, fsdp=8), shapes, {})
    assert [found[name].shard_shape(a.shape) for name, a in shapes.items()] == [(6, 16, 5), (6, 20)]


@pytest.mark.parametrize(("fsdp", "sizes"), [(1, {}), (8, {}), (12, {}), (16, dict(hosts=2)), (64, dict(hosts=8))])
def test_hosts_of_a_mesh(fsdp, sizes):
    devices = [jax.devices()[0]] * (2 * fsdp)
    mesh = sharding.create_mesh(tiny.config(mesh=dict(fsdp=fsdp)).mesh, devices)
    assert dict(mesh.shape) == {"data": 2, **sizes, "fsdp": 8 if sizes else fsdp}
    assert sharding.batch(mesh) == PartitionSpec(tuple(mesh.axis_names))


class Chip(types.SimpleNamespace):
    """A device of a TPU slice that is described and not there."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("fsdp", [1, 4, 8, 16])
def test_devices_of_a_tpu_slice_follow_the_order_of_their_processes(fsdp):
    """JAX's ring through a v5e of 4 x 4 chips visits the first host three times; each host has 2 x 2 chips."""
    chips = [
        Chip(
            id=4 * y + x, process_index=y // 2 * 2 + x // 2, coords=(x, y, 0), core_on_chip=0,
            platform="tpu", device_kind="TPU v5 lite",
        )
        for y in range(4) for x in range(4)
    ]  # fmt: skip
    mesh = sharding.create_mesh(tiny.config(mesh=dict(fsdp=fsdp)).mesh, chips)
    assert [chip.process_index for chip in mesh.devices.flat] == [i // 4 for i in range(16)]
    if fsdp == 1:  # a ring through each host
        assert [chip.id for chip in mesh.devices.flat][:4] == [0, 1, 5, 4]


def test_processes_with_different_numbers_of_devices_are_refused():
    devices = [Chip(process_index=process) for process in (0, 0, 0, 0, 1, 1)]
    with pytest.raises(
        ValueError, match="mesh: process 0 has 4 devices and process 1 has 2, and all must have the same"
    ):
        sharding.create_mesh(tiny.config().mesh, devices)


VIT = dict(width=64, num_heads=4, depth=2)
MODELS = {
    "vit_ti16": VIT,
    "octic_vit_ti16": VIT | dict(family="D8"),
    "swin_t": dict(width=16, depths=(2, 2), num_heads=(1, 2), window_size=(4, 4), adaptive=True, num_classes=16),
}


def moved(name, **options):
    """Elements of the largest array that moves between 8 devices in a gradient, of a parameter, and of activations."""
    model = zoo.abstract(name, image_size=(32, 32), patch_size=4, **MODELS[name], **options)
    batch, mesh = 64, sharding.create_mesh(tiny.config(mesh=dict(data=1, fsdp=8)).mesh)
    arrays, rows = logical.take(model), NamedSharding(mesh, sharding.batch(mesh))
    shardings = sharding.of_tree(mesh, arrays, logical.stack_axes(model))
    split = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shardings[name]) for name, a in arrays.items()}
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32, sharding=rows)

    def loss(arrays, images):
        return jnp.square(used(logical.put(model, arrays), AtUse("float32"))(images)).mean()

    # The equations: forms for a CPU put the axis of an irrep and the batch into one, which makes the batch move.
    with jax.set_mesh(mesh), kernels.using("reference"):
        compiled = jax.jit(jax.grad(loss), out_shardings=shardings).lower(split, images).compile()
    found = program.parse(compiled.as_text())
    sizes = [
        math.prod(array.shape)
        for computation in found.computations.values()
        for instruction in computation.values()
        if collectives.kind(instruction)
        for array in instruction.result
    ]
    of_block = max(math.prod(a.shape) for a in arrays.values())
    return max(sizes), of_block, batch * model.config.width * 8 * 8


@pytest.mark.parametrize(("name", "options"), [("octic_vit_ti16", {}), ("vit_ti16", dict(unroll=True)), ("swin_t", {})])
def test_parameters_move_and_activations_stay(name, options):
    largest, parameter, activations = moved(name, **options)
    assert largest <= parameter < activations


def test_without_gathering_activations_move(monkeypatch):
    """The test of the test: XLA by itself keeps the matrices split."""
    monkeypatch.setattr(kernels.mesh, "splits", lambda: False)
    largest, parameter, activations = moved("vit_ti16")
    assert parameter < activations <= largest
