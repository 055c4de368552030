"""What the model of a config costs, worked out on shapes alone: parameters, multiply-adds, memory of compiled steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import costs, logical
from equivit.data.pixels import normalize
from equivit.models import zoo
from equivit.training import build, optimizers, schedules, sharding, start
from equivit.training.state import compile_program


def counts(config: ConfigDict) -> dict:
    """Parameters of the model of a config, and its costs for one image.

    Returns:
      "model" (its section of the config), "image_size", "parameters", "costs" ({kind: {"macs", "operations"}}), "macs",
      "fvcore", "fvcore_unfused", "linear_and_norms" (`equivit/costs.py`), "notes".
    """
    model, image_size = abstract_model(config), tuple(config.data.image_size)
    image = jax.ShapeDtypeStruct((1, *image_size, model.config.in_channels), jnp.float32)
    counted = costs.count(_forward, model, image)
    return {
        "model": config.model.to_dict(),
        "image_size": image_size,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "costs": {kind: vars(cost) for kind, cost in counted.kinds.items()},
        "macs": counted.macs,
        "fvcore": counted.fvcore,
        "fvcore_unfused": counted.fvcore_unfused,
        "linear_and_norms": counted.linear_and_norms,
        "notes": list(counted.notes),
    }


def memory(config: ConfigDict) -> dict[str, dict[str, int]]:
    """Bytes on each device of the compiled forward pass and training step, for the batch and mesh of the config.

    Returns {"forward" or "train": {"arguments", "outputs", "temporaries", "peak"}}; the training step gives its state's
    memory to the new state, so outputs that reuse arguments are not in the peak twice.
    """
    mesh = sharding.create_mesh(config.mesh)
    sharding.check_batch(config.batch_size, config.optimizer.accumulation, mesh)
    model = abstract_model(config)
    channels, data = model.config.in_channels, config.data
    batch, train_batch = (
        _batch(config, size, channels, mesh) for size in (data.image_size, data.train_image_size or data.image_size)
    )
    forward = jax.jit(lambda m, images: _forward(m, normalize(images, config.data.mean, config.data.std)))
    with jax.set_mesh(mesh):
        return {
            "forward": _bytes(forward.lower(_placed(model, mesh), batch["image"]).compile()),
            "train": _bytes(_train_step(config, model.config.num_classes, mesh, train_batch).compile()),
        }


def _placed(model, mesh):
    """The abstract model with its parameters where training has them."""
    arrays = jax.eval_shape(logical.take, model)
    where = sharding.of_tree(mesh, arrays, logical.stack_axes(model))
    return logical.put(
        model, jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, where)
    )


def _train_step(config, num_classes, mesh, batch):
    """The lowered training step of a config."""
    if num_classes is None and config.objective.name != "mae":
        raise ValueError(f"--memory: {config.model.name} has no head to train; give it one with num_classes.")
    config = config.copy_and_resolve_references().unlock()
    config.model.num_classes = num_classes
    frozen = start.frozen_models(config)
    objective = build.make_objective(config, **frozen)
    # The length of the schedule is a constant inside the step: any that the warm-up fits into will do.
    schedule = schedules.create(config.schedule, total_steps=10**9, steps_per_epoch=1)
    program = compile_program(
        objective,
        lambda rngs: build.make_model(config, rngs),
        lambda trainable: optimizers.create(config.optimizer, objective, trainable, schedule),
        mesh,
        seed=config.seed,
        accumulation=config.optimizer.accumulation,
        frozen=frozen,
    )
    return program.step.lower(program.abstract, batch, objective.static(0))


def _batch(config, image_size, channels, mesh):
    sharded = jax.sharding.NamedSharding(mesh, sharding.BATCH)
    shapes = {"image": ((*image_size, channels), np.uint8), "label": ((), np.int32)}
    return {
        name: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype, sharding=sharded)
        for name, (shape, dtype) in shapes.items()
    }


def _bytes(compiled) -> dict[str, int]:
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("--memory: this platform's compiler does not tell how much memory a program takes.")
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "peak": held + stats.temp_size_in_bytes,
    }


def _forward(model, images):
    """Logits, or the features of a model without a head."""
    return model.features(images) if model.config.num_classes is None else model(images)


def abstract_model(config: ConfigDict) -> nnx.Module:
    """The model of a config with shapes in place of arrays."""
    try:
        return zoo.abstract(**config.model)
    except TypeError as error:  # a value of the wrong type is only noticed where it is used
        given = ", ".join(f"{key}={value!r}" for key, value in config.model.items() if key != "name")
        raise ValueError(f"model {config.model.name}: cannot be built with {given}: {error}.") from error
