"""From a config to a compiled run: its model, its objective, its optimiser, and one step."""

import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from equivit import logical
from equivit.layers.rngs import Keys
from equivit.logical import Arrays
from equivit.models import zoo
from equivit.models.model import Config
from equivit.objectives.objective import Batch, Objective
from equivit.objectives.registry import OBJECTIVES
from equivit.training import freezing, optimizers, schedules, sharding
from equivit.training.schedules import Schedule
from equivit.training.state import Metrics, State, begin, make_step


class Program(NamedTuple):
    """A compiled run.

    Attributes:
      objective: what is minimised.
      module: what is trained, with shapes in place of arrays.
      abstract: the state as ShapeDtypeStructs with their shardings.
      given: the arrays of the models that are used and not trained, by model.
      init: the first state, from parameters of the model, or of what the objective adds to it, that replace the drawn
        ones, or {}.
      compiled: the jitted step; it takes (state, given, batch, static) and gives the state's memory away.
      lr: the learning rate of a step.
      weight_decay: that of a step; None where it stays as it is.
    """

    objective: Objective
    module: nnx.Module
    abstract: State
    given: dict[str, Arrays]
    init: Callable[[Arrays], State]
    compiled: Any
    lr: Schedule
    weight_decay: Schedule | None = None

    def step(self, state: State, batch: Batch, static: Hashable = None) -> tuple[State, Metrics]:
        """One step."""
        return self.compiled(state, self.given, batch, static)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The first step, traced and lowered for an abstract batch."""
        return self.compiled.lower(self.abstract, self.given, batch, self.static(0.0))

    def rates(self, step: int) -> dict[str, float]:
        """The values of the schedules to log: "lr" and, if it changes, "weight_decay"."""
        changing = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: float(schedule(step)) for name, schedule in changing.items() if schedule is not None}

    def static(self, progress: float) -> Hashable:
        """The static argument of the compiled step after a share `progress` of the run."""
        return self.objective.static(self.module, progress)

    def exported(self, state: State) -> nnx.Module:
        """The model that evaluation and other programs use."""
        return self.objective.exported(logical.put(self.module, state.arrays), state.extra)


def make_model(config: ConfigDict, rngs: nnx.Rngs) -> nnx.Module:
    """The model of the `model` section."""
    return model_configuration(config).build(rngs)


def model_configuration(config: ConfigDict) -> Config:
    """The configuration of the model that the `model` section names."""
    return zoo.configuration(**config.model)


def make_objective(config: ConfigDict) -> Objective:
    """The objective of the `objective` section; `config.model.num_classes` must be known."""
    return OBJECTIVES[config.objective.name](config)


def exported_model(config: ConfigDict) -> nnx.Module:
    """The model that a run will be evaluated as, with shapes in place of arrays."""
    objective = make_objective(config)

    def make():
        module = objective.module(make_model(config, Keys(0)), jax.random.key(0))
        return objective.exported(module, begin(objective, module).extra)

    return jax.eval_shape(make)


def of_config(
    config: ConfigDict,
    mesh: Mesh,
    *,
    total: int,
    per_epoch: int,
    given: Mapping[str, nnx.Module] = types.MappingProxyType({}),
    objective: Objective | None = None,
    build: Callable[[nnx.Rngs], nnx.Module] | None = None,
) -> Program:
    """The program of a config, with its state placed on the mesh by rule.

    Args:
      config: a checked config; what the data decide about the model is known.
      mesh: of `sharding.create_mesh`.
      total, per_epoch: steps of the run and of an epoch; all schedules are made for `schedule.length`, if that is set.
      given: models that are used and not trained, by name; they may be abstract if the step is only lowered.
      objective: in place of the config's.
      build: makes the model, in place of the config's.

    Raises:
      ValueError: the schedule does not fit into the run, or optimiser and model do not go together.
    """
    total = config.schedule.length or total
    lr = schedules.create(config.schedule, total_steps=total, steps_per_epoch=per_epoch)
    objective = objective or make_objective(config)
    build = build or functools.partial(make_model, config)

    def make_module(arrays):
        model_key, module_key = jax.random.split(jax.random.key(config.seed))
        model = build(Keys(model_key))
        others = arrays.keys() - logical.names(model, nnx.Variable).keys()
        of_objective = {objective.prefix + leaf: arrays[leaf] for leaf in others}
        return logical.put(objective.module(logical.put(model, arrays), module_key), of_objective)

    module = logical.abstract(jax.eval_shape(make_module, {}))
    weight_decay = schedules.weight_decay(config.optimizer, total_steps=total)
    trainable = jax.eval_shape(lambda module: begin(objective, module), module).trainable
    tables = logical.tensors(module)
    rule = freezing.rule(objective, tables)
    optimizer = optimizers.create(config.optimizer, rule, tables, trainable, lr, weight_decay)
    abstract = jax.eval_shape(lambda module: begin(objective, module, optimizer), module)
    everywhere, stacks = NamedSharding(mesh, PartitionSpec()), _stacks([*given.values(), module])
    shardings = sharding.of_tree(mesh, abstract, stacks)
    placed, places = _placed(mesh, given, stacks)
    step = make_step(
        objective,
        module,
        optimizer,
        seed=config.seed,
        total=total,
        per_epoch=per_epoch,
        accumulation=config.optimizer.accumulation,
        given={name: logical.abstract(model) for name, model in given.items()},
    )
    compiled = jax.jit(
        step,
        static_argnums=3,
        donate_argnums=0,
        in_shardings=(shardings, places, NamedSharding(mesh, sharding.BATCH)),
        out_shardings=(shardings, everywhere),
    )
    init = jax.jit(
        lambda arrays: begin(objective, make_module(arrays), optimizer),
        out_shardings=shardings,
        compiler_options=_quickly(mesh),
    )
    changing = None if config.optimizer.weight_decay_end is None else weight_decay
    return Program(objective, module, _at(abstract, shardings), placed, init, compiled, lr, changing)


def _quickly(mesh) -> dict[str, int] | None:
    """Compiler options of a program that runs once: on a CPU it would take as long to compile as the training step.

    The first level draws the same bits as the last one, and as fast, and compiles in a quarter of the time.
    """
    return {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None


def _stacks(modules) -> dict[str, int]:
    """How many leading axes of each leaf are stacks of logical tensors."""
    tables = {leaf: table for module in modules for leaf, table in logical.tensors(module, nnx.Variable).items()}
    return {leaf: table.ndim for leaf, table in tables.items()}


def _placed(mesh, given, stacks):
    """The arrays of the given models on the mesh, and their shardings."""
    arrays = {name: logical.take(model, nnx.Variable) for name, model in given.items()}
    places = sharding.of_tree(mesh, arrays, stacks)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)):
        return _at(arrays, places), places
    return jax.jit(lambda arrays: arrays, out_shardings=places)(jax.device_get(arrays)), places


def _at(tree, shardings):
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
