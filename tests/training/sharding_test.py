"""Parameters that are split over devices: what moves between the devices in a training step."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import kernels
from equivit import logical
from equivit.layers.stack import gathered_outside
from equivit.models import zoo
from equivit.targets import collectives, program
from equivit.training import sharding
from kernels import gathering
from tests.training import tiny

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
    arrays, rows = logical.take(model), NamedSharding(mesh, sharding.BATCH)
    shardings = sharding.of_tree(mesh, arrays, logical.stack_axes(model))
    split = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shardings[name]) for name, a in arrays.items()}
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32, sharding=rows)

    def loss(arrays, images):
        return jnp.square(gathered_outside(logical.put(model, arrays))(images)).mean()

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
    monkeypatch.setattr(gathering, "needed", lambda: False)
    largest, parameter, activations = moved("vit_ti16")
    assert parameter < activations <= largest
