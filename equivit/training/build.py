"""Build the parts of a run from its config: model, objective, training data, and the compiled program."""

import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from equivit import logical
from equivit.data import loader
from equivit.data.loader import TrainPipeline
from equivit.layers import stack
from equivit.layers.rngs import Keys
from equivit.logical import Arrays
from equivit.models import zoo
from equivit.models.model import Config, ModelModule
from equivit.objectives.objective import Batch, Objective
from equivit.objectives.registry import OBJECTIVES
from equivit.training import freezing, optimizers, schedules, sharding
from equivit.training.schedules import Schedule
from equivit.training.state import Metrics, State, begin, make_step


class Program(NamedTuple):
    """A compiled run."""

    objective: Objective
    module: nnx.Module  # the trained module, with shapes in place of arrays
    abstract: State  # ShapeDtypeStructs with their shardings
    teachers: dict[str, Arrays]  # the arrays of the teachers, by name
    # Makes the first state.  Its argument holds arrays by name, of the model or of the objective's additions, that
    # replace random initial values.
    init: Callable[[Arrays], State]
    compiled: Any  # the jitted step of (state, teachers, batch, static), which donates the state
    lr: Schedule  # by number of updates, from which steps skipped in float16 are left out
    total: int  # steps of the schedules: `schedule.length`, or the run's length
    weight_decay: Schedule | None = None  # likewise; None if it is constant

    def step(self, state: State, batch: Batch, static: Hashable = None) -> tuple[State, Metrics]:
        """The state and the metrics after one step."""
        return self.compiled(state, self.teachers, batch, static)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The first step, traced and lowered for an abstract batch."""
        return self.compiled.lower(self.abstract, self.teachers, batch, self.static(0.0))

    def rates(self, updates: int) -> dict[str, float]:
        """The values of the schedules to log: "lr" and, if it changes, "weight_decay"."""
        changing = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: float(schedule(updates)) for name, schedule in changing.items() if schedule is not None}

    def static(self, progress: float) -> Hashable:
        """The static argument of the compiled step at `progress`, the finished fraction of the schedules."""
        return self.objective.static(self.module, progress)

    def exported(self, state: State) -> nnx.Module:
        """The model for evaluation and other programs."""
        return self.objective.exported(logical.put(self.module, state.arrays), state.extra)


def model_configuration(config: ConfigDict) -> Config:
    """The configuration of the model that the `model` section names."""
    return zoo.configuration(**config.model)


def make_model(config: ConfigDict, rngs: nnx.Rngs) -> nnx.Module:
    """The model of the `model` section."""
    return model_configuration(config).build(rngs)


def make_objective(config: ConfigDict) -> Objective:
    """The objective of the `objective` section; `config.model.num_classes` must be known."""
    return OBJECTIVES[config.objective.name](config)


def exported_model(objective: Objective, model: Config) -> ModelModule:
    """The model that a run with this objective exports, with shapes in place of arrays."""
    module = abstract_module(objective, model)
    return jax.eval_shape(lambda module: objective.exported(module, begin(objective, module).extra), module)


def abstract_module(objective: Objective, model: Config) -> nnx.Module:
    """The module that a run with this objective trains, with shapes in place of arrays."""
    return jax.eval_shape(lambda: objective.module(model.build(Keys(0)), jax.random.key(0)))


def make_pipeline(config: ConfigDict) -> TrainPipeline:
    """The training data of a config, for this process.

    Raises as `loader.train`.
    """
    objective = OBJECTIVES[config.objective.name]
    return loader.train(
        config.data,
        batch_size=config.batch_size,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        workers=config.data.workers,
        entries=objective.entries,
        transform=objective.transform_of(config),
    )


def make_program(
    config: ConfigDict,
    mesh: Mesh,
    *,
    total: int,
    per_epoch: int,
    teachers: Mapping[str, nnx.Module] = types.MappingProxyType({}),
    objective: Objective | None = None,
    build_model: Callable[[nnx.Rngs], nnx.Module] | None = None,
) -> Program:
    """Compile the run of a config, with its state sharded over the mesh.

    Args:
      config: a checked config, completed from the data.
      mesh: from `sharding.create_mesh`.
      total, per_epoch: steps of the run and of an epoch; `schedule.length`, if set, replaces `total`.
      teachers: models that the objective uses but does not train, by name; abstract models suffice to lower the step.
      objective: None: the config's.
      build_model: None: builds the model of the config.

    Raises:
      ValueError: the schedule does not fit the run, or the optimiser does not fit the model.
    """
    total = config.schedule.length or total
    objective = objective or make_objective(config)
    make_module = _module_maker(objective, build_model or model_configuration(config).build, config.seed)
    module = logical.abstract(jax.eval_shape(make_module, {}))
    optimizer, lr, weight_decay = make_optimizer(config, objective, module, total=total, per_epoch=per_epoch)

    abstract = jax.eval_shape(lambda module: begin(objective, module, optimizer), module)
    stacks = logical.stack_axes(*teachers.values(), module)
    shardings = sharding.of_tree(mesh, abstract, stacks)
    teacher_arrays, teacher_shardings = _on_mesh(mesh, teachers, stacks)
    step = make_step(
        objective,
        module,
        optimizer,
        seed=config.seed,
        total=total,
        per_epoch=per_epoch,
        accumulation=config.optimizer.accumulation,
        teachers={name: logical.abstract(model) for name, model in teachers.items()},
    )
    compiled = _jitted_step(step, mesh, shardings, teacher_shardings)
    init = _jitted_init(lambda arrays: begin(objective, make_module(arrays), optimizer), mesh, shardings)
    changing = None if config.optimizer.weight_decay_end is None else weight_decay
    return Program(objective, module, _at(abstract, shardings), teacher_arrays, init, compiled, lr, total, changing)


def make_optimizer(
    config: ConfigDict, objective: Objective, module: nnx.Module, *, total: int, per_epoch: int
) -> tuple[optax.GradientTransformationExtraArgs, Schedule, Schedule]:
    """The optimiser of an abstract module, and the schedules of its learning rate and of weight decay.

    Args:
      total, per_epoch: steps of the schedules and of an epoch.

    Raises:
      ValueError: the schedule does not fit the run, or a value of the `optimizer` section does not fit the module.
    """
    lr = schedules.create(config.schedule, total_steps=total, steps_per_epoch=per_epoch)
    weight_decay = schedules.weight_decay(config.optimizer, total_steps=total)
    tables = logical.tensors(module)
    trainable = jax.eval_shape(lambda module: begin(objective, module), module).trainable
    rule = freezing.rule(objective, tables)
    return optimizers.create(config.optimizer, rule, tables, trainable, lr, weight_decay), lr, weight_decay


def _module_maker(objective, build_model, seed) -> Callable[[Arrays], nnx.Module]:
    """A function that builds the module to train; its argument, arrays by name, replaces random initial values."""

    def make(arrays):
        model_key, module_key = jax.random.split(jax.random.key(seed))
        model = build_model(Keys(model_key))
        others = arrays.keys() - logical.names(model, nnx.Variable).keys()
        additions = {objective.prefix + leaf: arrays[leaf] for leaf in others}
        return logical.put(objective.module(logical.put(model, arrays), module_key), additions)

    return make


def _jitted_step(step, mesh, shardings, teacher_shardings):
    """The step of `make_step` on the mesh: it donates the state, and its last argument is static."""
    unroll = platform_of(mesh) != "cpu"

    def unrolled(*arguments):
        # Under a scan, saving the blocks' activations takes a third of a training step on a GPU, and by libtpu's count
        # a fifth of the bytes on a TPU.
        with stack.unrolled(unroll):
            return step(*arguments)

    return jax.jit(
        unrolled,
        static_argnums=3,
        donate_argnums=0,
        in_shardings=(shardings, teacher_shardings, NamedSharding(mesh, sharding.batch(mesh))),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )


def _jitted_init(init, mesh, shardings):
    """`init` with its result on the mesh."""
    # Runs once.  At level 1 a CPU compiles it in a quarter of the time, draws the same bits and is as fast.  Where JAX
    # is asked to disable optimizations, the level is 0 already.
    at_level_1 = platform_of(mesh) == "cpu" and not jax.config.read("jax_disable_most_optimizations")
    options = {"xla_backend_optimization_level": 1} if at_level_1 else None
    return jax.jit(init, out_shardings=shardings, compiler_options=options)


def platform_of(mesh: Mesh) -> str:
    """The platform of the devices: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def _on_mesh(mesh, teachers, stacks):
    """The arrays of the teachers on the mesh, and their shardings."""
    arrays = {name: logical.take(model, nnx.Variable) for name, model in teachers.items()}
    shardings = sharding.of_tree(mesh, arrays, stacks)
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)):
        return _at(arrays, shardings), shardings
    return jax.jit(lambda arrays: arrays, out_shardings=shardings)(jax.device_get(arrays)), shardings


def _at(tree, shardings):
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
