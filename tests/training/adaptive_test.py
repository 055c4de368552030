"""A step of an adaptive model: devices agree, and what each image chooses leaves it where it is."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.training import build, sharding
from equivit.training.config import get_base
from tests.training.state_test import CLOSE, mesh_of

SMALL = dict(width=8, depths=(1, 1), num_heads=(1, 2), patch_size=2, window_size=(2, 2), image_size=(16, 8))
MOVING = r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("  # what sums gradients is all-reduce


def config():
    c = get_base()
    c.update(steps=2, batch_size=16)
    c.model = dict(name="swin_t", **SMALL, num_classes=5, in_channels=3, adaptive=True)
    c.data.image_size = SMALL["image_size"]
    c.optimizer.update(name="sgd", momentum=0.0, clip=None)
    c.schedule.update(name="constant", lr=10.0)
    return c.lock()


def batch():
    """Images, one of them black, so that choices between equals are made too."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, *SMALL["image_size"], 3)).astype(np.uint8)
    images[3] = 0
    return {"image": images, "label": rng.integers(0, 5, 16).astype(np.int32)}


def beginning(abstract):
    """A state with every parameter random."""
    rng = np.random.default_rng(1)
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract)
    trainable = {name: rng.normal(0, 0.5, a.shape).astype(a.dtype) for name, a in zeros.trainable.items()}
    return zeros._replace(trainable=trainable, good=np.True_)


@pytest.mark.slow
def test_eight_devices_equal_one_and_move_no_image():
    rows, found = batch(), []
    for devices in (1, 8):
        mesh = mesh_of(devices, 1)
        with jax.set_mesh(mesh):
            program = build.make_program(config(), mesh, total=2, per_epoch=1)
            step = program.lower(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows)).compile()
            start, places = beginning(program.abstract), jax.tree.map(lambda a: a.sharding, program.abstract)
            found.append(jax.device_get(step(jax.device_put(start, places), {}, sharding.to_global(mesh, rows))))
    chex.assert_trees_all_close(*found, **CLOSE)
    state, metrics = found[0]
    assert metrics["good"]
    for name, before in start.trainable.items():
        assert np.abs(state.trainable[name] - before).max() > 1e-4, name
    text = step.as_text()  # of eight
    assert "all-reduce" in text and not re.findall(MOVING, text)


def test_what_moves_images_would_be_seen():
    """A scatter that does not say which axis is the batch."""
    mesh = mesh_of(8, 1)
    put = functools.partial(jnp.put_along_axis, axis=1, inplace=False)
    row = jax.ShapeDtypeStruct((16, 6), jnp.int32, sharding=jax.NamedSharding(mesh, sharding.batch(mesh)))
    assert re.findall(MOVING, jax.jit(put).lower(row, row, row).compile().as_text()) == ["all-gather"] * 2
