"""Compiled forward passes of models and blocks of the zoo, and training steps, for timing.

They are compiled from shapes alone, so that their memory is known before anything is allocated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit import testing
from equivit.layers.grid import check_grid
from equivit.models import zoo
from equivit.models.inference import fold
from equivit.precision import cast
from equivit.symmetry import fields
from experiments import machine

# Parameters are stored in float32 and cast in the call, as in octic ViTs, Appendix D.4; with "bfloat16" they are stored
# so, as to serve a model.
PRECISIONS = ("mixed", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function, and the memory that its program takes.

    `start` allocates random arguments and returns the call to time; without references to it they are freed.
    """

    start: Callable[[], Callable[[], Any]]
    memory: machine.Memory | None


def forward(name: str, *, batch: int, precision: str, folded: bool = False, **options) -> Compiled:
    """Logits of a batch of images by a model of the zoo; `folded`: its batch norms folded into convolutions."""
    shape = (batch, *zoo.configuration(name, **options).input_shape)

    def model():
        made = zoo.create(name, **options)
        return fold(made) if folded else made

    return _compiled(model, lambda: jax.random.normal(jax.random.key(1), shape), precision)


def block(name: str, *, batch: int, precision: str, **options) -> Compiled:
    """The first block of a model of the zoo, on as many tokens as the model has."""
    config = zoo.configuration(name, **options)
    h, w = check_grid(config.image_size, config.patch_size, "image_size")

    def tokens():
        stream = "bfloat16" if precision == "bfloat16" else "float32"
        x = jax.random.normal(jax.random.key(1), (batch, config.prefix + h * w, config.width), stream)
        return x if config.group is None else fields.from_dense(x, config.group)

    return _compiled(lambda: zoo.create(name, **{**options, "depth": 1}).blocks[0], tokens, precision)


def parameters(name: str, **options) -> int:
    """The number of parameters of a model of the zoo."""
    return sum(a.size for a in jax.tree.leaves(zoo.abstract(name, **options)))


def random_model(name: str, **options):
    """A model of the zoo with random parameters, drawn by NumPy: nothing is compiled."""
    return testing.randomise(zoo.abstract(name, **options), jax.random.key(0))


def call(function: Callable, *arguments) -> Callable[[], Any]:
    """The call of a function compiled for these arguments."""
    return compiled(function, *arguments).start()


def compiled(function: Callable, *arguments) -> Compiled:
    """A function compiled for arguments, which may be shapes if it never starts."""
    leaves, program = _flat(function, arguments)

    def start():
        arrays = jax.block_until_ready(jax.device_put(leaves))
        return lambda: program(arrays)

    return Compiled(start, machine.memory(program))


def _flat(function: Callable, arguments: tuple) -> tuple[list, jax.stages.Compiled]:
    """The leaves of the arguments, and a program that takes them as a list: the host is slow to flatten a module."""
    leaves, structure = jax.tree.flatten(arguments)
    return leaves, jax.jit(lambda leaves: function(*jax.tree.unflatten(structure, leaves))).lower(leaves).compile()


def _compiled(module, x, precision) -> Compiled:
    """The module that `module` makes, compiled for what `x` makes."""

    def make():
        made = module()
        return cast(made, "bfloat16") if precision == "bfloat16" else made, x()

    _, program = _flat(lambda module, x: cast(module, precision)(x), jax.eval_shape(make))

    def start():
        arguments = jax.block_until_ready(jax.jit(lambda: jax.tree.leaves(make()))())
        return lambda: program(arguments)

    return Compiled(start, machine.memory(program))


def training_step(config, objective=None) -> Compiled:
    """A training step of a config (`ml_collections.ConfigDict`): objective, gradient and optimizer, random images.

    `objective` is one to take in place of the config's.
    """
    lowered, batch, init = lower_training_step(config, objective)
    program = lowered.compile()

    def start():
        state, arrays = [init()], jax.tree.map(lambda a: _random(a.shape, a.dtype), batch)

        def call():
            state[0], metrics = program(state[0], {}, arrays)
            return metrics

        return call

    return Compiled(start, machine.memory(program))


def first_step(config, mesh):
    """The program of a config, its state at the start and its first batch of training images, on the mesh in use."""
    from equivit.data import loader
    from equivit.training import build, sharding

    objective = build.make_objective(config)
    options = dict(batch_size=config.batch_size, seed=config.seed, entries=objective.entries)
    pipeline = loader.train(config.data, **options, transform=objective.transform_of(config))
    run = build.make_program(loader.complete(config, pipeline), mesh, total=100, per_epoch=10)
    return run, run.init({}), sharding.to_global(mesh, next(iter(pipeline.batches())))


def lower_training_step(config, objective=None) -> tuple[jax.stages.Lowered, dict, Callable[[], Any]]:
    """The training step of a config, as `equivit/training/loop.py` runs it, traced and lowered for one device.

    Also the shapes of its batch, and a function that makes its first state.  Raises ImportError without ml_collections,
    which forward passes do not need.
    """
    from equivit.data import loader
    from equivit.training import build, sharding

    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1])
    run = build.make_program(config, mesh, total=10**6, per_epoch=10**3, objective=objective)
    where = jax.sharding.NamedSharding(mesh, sharding.batch(mesh))
    shapes = loader.shapes(config.data, config.batch_size, channels=3)
    batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for name, a in shapes.items()}
    with jax.set_mesh(mesh):
        step = run.lower(batch)
    return step, batch, lambda: run.init({})


def _random(shape, dtype):
    """Pixels 0..255 or labels 0..9; every model has ten classes or more."""
    return jnp.asarray(np.random.default_rng(0).integers(0, 256 if dtype == np.uint8 else 10, shape, dtype))
