"""A classifier small enough for tests of the training loop, with a stack of blocks as real models have."""

import copy

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.stack import Stack
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Step
from equivit.training import build, sharding
from equivit.training.config import get_base

CLASSES, SIDE, WIDTH = 8, 4, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, layout=None, **options):
        return x + nnx.relu(self.linear(x))


class Tiny(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(SIDE * SIDE, WIDTH, rngs=rngs)
        self.blocks = Stack([(2, Block)], rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.scale = nnx.Param(jnp.asarray(1.0)[None])  # of a weak type, as constants are

    def __call__(self, images, *, key=None, train=False):
        x = self.embed(images.reshape(images.shape[0], -1))
        return self.scale * self.head(self.blocks(x, key=key)[0])


def config(**sections):
    """The defaults, changed by sections such as `optimizer=dict(name="sgd")`."""
    base = get_base()
    base.steps, base.batch_size = 10, 16
    base.model.num_classes = CLASSES
    base.data.update(image_size=(SIDE, SIDE), mean=(0.5,), std=(0.5,))
    for section, values in sections.items():
        base[section].update(values)
    return base


def make_program(options, mesh, *, build_model=Tiny, **others):
    """`build.make_program` for a tiny model."""
    return build.make_program(options, mesh, build_model=build_model, **others)


def exported_model(config):
    """The model that a run of a config exports, with shapes in place of arrays."""
    return build.exported_model(build.make_objective(config), build.model_configuration(config))


def program(options, mesh, *, lr=1e-2, total=10, **others):
    """The program of a config, at a constant learning rate."""
    options = copy.deepcopy(options)
    options.schedule.update(name="constant", lr=lr)
    return make_program(options, mesh, total=total, per_epoch=4, **others)


def step(key=0, *, static=None, extra=None, teachers=None, at=0):
    """The inputs of a loss beside module and batch."""
    return Step(jax.random.key(key), Clock(at, 10, 4), static, extra or {}, teachers or {})


def batch(t, size=16):
    """The t-th batch: random images with labels that depend on them."""
    keys = jax.random.split(jax.random.key(t))
    images = jax.random.randint(keys[0], (size, SIDE, SIDE, 1), 0, 256).astype(jnp.uint8)
    return {"image": jax.device_get(images), "label": jax.device_get(images[:, 0, 0, 0] // 32).astype("int32")}


def run(program, mesh, steps, start=None):
    """The state and the metrics after some steps."""
    current, metrics = program.init({}) if start is None else start, None
    for t in range(int(current.step), steps):
        current, metrics = program.step(current, sharding.to_global(mesh, batch(t)))
    return current, metrics
