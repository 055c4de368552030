"""The costs of a config's model, computed from shapes: parameters, multiply-adds, memory of compiled steps."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from equivit import costs, logical, precision
from equivit.data import loader
from equivit.data.pixels import normalize
from equivit.layers.rngs import Keys
from equivit.models.model import ModelModule
from equivit.objectives.registry import OBJECTIVES
from equivit.training import build, sharding
from equivit.training.teachers import load_teachers


def counts(config: ConfigDict) -> dict:
    """Parameters of the model of a config, and its costs for one image.

    Returns:
      "model" (its section of the config), "image_size", "parameters", "costs" ({kind: {"macs", "operations"}}), "macs",
      "fvcore", "fvcore_unfused", "linear_and_norms", "double_macs" (`equivit/costs.py`), "notes".
    """
    model, image_size = abstract_model(config), tuple(config.data.image_size)
    image = jax.ShapeDtypeStruct((1, *image_size, model.config.input_shape[-1]), jnp.float32)
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
        "double_macs": counted.double_macs,
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
    evaluated, trained = (_batch(config, model.config.input_shape[-1], mesh, training=t) for t in (False, True))

    @jax.jit
    def forward(model, images):
        model = precision.cast(model, config.precision)
        return _forward(model, normalize(images, config.data.mean, config.data.std))

    with jax.set_mesh(mesh):
        return {
            "forward": _bytes(forward.lower(_placed(model, mesh), evaluated["image"]).compile()),
            "train": _bytes(_train_step(config, model.config.num_classes, mesh, trained).compile()),
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
    config = config.copy_and_resolve_references().unlock()
    config.model.num_classes = num_classes
    # The length of the run is a constant inside the step: any that the warm-up fits into will do.
    run = build.make_program(config, mesh, total=10**9, per_epoch=1, teachers=load_teachers(config))
    return run.lower(batch)


def _batch(config, channels, mesh, *, training):
    """The abstract global batch."""
    objective = OBJECTIVES[config.objective.name]
    shapes = loader.shapes(
        config.data,
        config.batch_size,
        channels=channels,
        training=training,
        entries=objective.entries,
        transform=objective.transform_of(config),
    )
    where = jax.sharding.NamedSharding(mesh, sharding.BATCH)
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for name, a in shapes.items()}


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


def abstract_model(config: ConfigDict) -> ModelModule:
    """The model of a config with shapes in place of arrays, with its decoder where the objective adds one."""
    if OBJECTIVES[config.objective.name].decodes:
        return build.exported_model(build.make_objective(config), build.model_configuration(config))
    return jax.eval_shape(lambda: build.make_model(config, Keys(0)))
