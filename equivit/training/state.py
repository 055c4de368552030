"""The train state and the pure train step."""

import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from equivit import logical
from equivit.layers.batch_stats import recording
from equivit.logical import Arrays
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Batch, Extra, Objective, Step
from equivit.training import freezing, loss_scale, sharding
from equivit.training.loss_scale import LossScale

Metrics = dict[str, jax.Array]


class State(NamedTuple):
    """The full state of a run; it suffices to resume."""

    step: jax.Array  # int32: finished steps
    good: jax.Array  # bool: False from the first non-finite loss or gradient on, without steps that are skipped
    trainable: Arrays  # the optimised parameters
    frozen: Arrays  # the other parameters, without gradient and optimiser state
    statistics: Arrays  # the other arrays of the module: running statistics, buffers
    extra: Extra  # arrays that the objective keeps from step to step
    optimizer: Any = ()
    loss_scale: LossScale | None = None  # in precision "float16"

    @property
    def arrays(self) -> Arrays:
        """All arrays of the module."""
        return {**self.trainable, **self.frozen, **self.statistics}


def begin(objective: Objective, module: nnx.Module, optimizer: optax.GradientTransformation | None = None) -> State:
    """The state before the first step of training `module`.

    A leaf is in `frozen` if all its logical tensors are frozen; in others the optimiser masks frozen slices.
    """
    tables = logical.tensors(module)
    rule = freezing.rule(objective, tables)
    trainable, frozen = {}, {}
    for leaf, array in logical.take(module).items():
        still = all(rule(tensor).frozen for tensor in tables[leaf].flat)
        (frozen if still else trainable)[leaf] = array
    statistics, extra = logical.take_state(module), objective.extra(trainable)
    state = State(jnp.int32(0), jnp.bool_(True), trainable, frozen, statistics, extra)
    if optimizer is not None:
        scale = loss_scale.start(objective.config.get("precision", "float32"))
        state = state._replace(optimizer=optimizer.init(trainable), loss_scale=scale)
    return jax.tree.map(lambda a: jnp.asarray(a, a.dtype), state)  # a weak type would compile the step twice


def make_step(
    objective: Objective,
    module: nnx.Module,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    seed: int | jax.Array,
    total: int,
    per_epoch: int,
    accumulation: int = 1,
    teachers: Mapping[str, nnx.Module] = types.MappingProxyType({}),
) -> Callable[[State, dict[str, Arrays], Batch, Hashable], tuple[State, Metrics]]:
    """`step(state, arrays of the teachers, batch, static) -> state, metrics`.

    The whole batch is prepared (mixed, masked) and then split into `accumulation` micro-batches, so that mixing does
    not depend on their number.  Batch statistics are computed per micro-batch; running statistics pass from each to
    the next.  From the first non-finite loss or gradient on, steps leave the state unchanged, and `metrics["good"]`
    is False.  With a loss scale that may fall, a non-finite gradient skips one step: only `step` and the scale change,
    and `metrics["skipped"]` is True.

    Args:
      module: the trained module (`objective.module`); it may be abstract, as may `teachers`.
      total, per_epoch: steps of the run and of an epoch.
      accumulation: number of micro-batches.
      teachers: models that the objective uses but does not train, by name.

    Raises:
      ValueError: during tracing, if the loss leaves all running statistics of trained parts unchanged.
    """

    tables = logical.tensors(module)
    masks = freezing.masks(freezing.rule(objective, tables), tables, logical.take(module))

    def step(state: State, arrays: dict[str, Arrays], batch: Batch, static: Hashable):
        prepare_key, loss_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step))
        batch = objective.prepare(module, batch, prepare_key)
        clock, scale = Clock(state.step, total, per_epoch), state.loss_scale

        def loss(trainable, carried, batch, key):
            extra, statistics = carried
            models = {name: objective.holding(model, arrays[name]) for name, model in teachers.items()}
            trained = objective.holding(module, {**state.frozen, **statistics, **trainable})
            before = logical.take(trained, nnx.BatchStat)
            with recording():
                value, metrics, after = objective.loss(trained, batch, Step(key, clock, static, extra, models))
            _check_statistics(objective, trained, before, trainable)
            value = loss_scale.multiply(scale, value)
            return value, (metrics, (extra if after is None else after, logical.take_state(trained)))

        carried = (state.extra, state.statistics)
        value, metrics, carried, gradients = _gradients(loss, state.trainable, carried, batch, loss_key, accumulation)
        gradients = freezing.masked(gradients, masks)  # so that frozen slices are in no norm
        value, gradients = loss_scale.divide(scale, (value, gradients))
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        good = state.good & jnp.isfinite(value) & (finite | loss_scale.may_fall(scale))
        taken = good & finite
        updates, moments = optimizer.update(gradients, state.optimizer, state.trainable, good=taken)
        trainable: Any = optax.apply_updates(state.trainable, updates)
        extra = objective.after_step(trainable, carried[0], clock)
        after = State(state.step, good, trainable, state.frozen, carried[1], extra, moments, scale)
        after = jax.tree.map(lambda new, old: jnp.where(taken, new, old), after, state)
        scale_after = loss_scale.after(scale, good, finite)
        after = after._replace(step=state.step + good, good=good, loss_scale=scale_after)
        metrics = {**metrics, "loss": value, "grad_norm": norm, "good": good}
        return after, metrics if scale is None else {**metrics, "loss_scale": scale.value, "skipped": ~finite}

    return step


def _gradients(loss, trainable, carried, batch, key, accumulation):
    """Average loss, metrics and gradients over the micro-batches; `carried` passes from one to the next."""

    def one(carried, part):
        index, batch = part
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, (metrics, carried)), gradients = gradient(trainable, carried, batch, jax.random.fold_in(key, index))
        return carried, (value, metrics, gradients)

    if accumulation == 1:
        carried, (value, metrics, gradients) = one(carried, (0, batch))
        return value, metrics, carried, gradients

    def add(carry, part):
        carried, total = carry
        carried, result = one(carried, part)
        return (carried, jax.tree.map(jnp.add, total, result)), None

    parts = (jnp.arange(accumulation), jax.tree.map(lambda rows: _cut(rows, accumulation), batch))
    shapes = jax.eval_shape(lambda p: one(carried, jax.tree.map(lambda a: a[0], p))[1], parts)
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    (carried, total), _ = jax.lax.scan(add, (carried, nothing), parts)
    value, metrics, gradients = jax.tree.map(lambda a: a / accumulation, total)
    return value, metrics, carried, gradients


def _cut(rows, parts):
    """[B, ...] -> [parts, B / parts, ...]; every part has rows of every device, so no row moves."""
    rows = jnp.moveaxis(rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]), 1, 0)
    examples = sharding.batch(jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(None, *examples))


def _check_statistics(objective, module, before, trainable):
    """ValueError if running statistics should have changed and none did; in a frozen part they need not change."""
    parameters, after = logical.take(module), logical.take(module, nnx.BatchStat)

    def belongs_to_trained(leaf):  # to the smallest enclosing part with parameters
        path = leaf.split(".")
        prefixes = [".".join([*path[:n], ""]) for n in range(len(path) - 1, -1, -1)]
        inside = ([name for name in parameters if name.startswith(prefix)] for prefix in prefixes)
        return any(name in trainable for name in next(filter(None, inside), ()))

    expected = [leaf for leaf in before if belongs_to_trained(leaf)]
    if expected and all(after[leaf] is before[leaf] for leaf in expected):
        raise ValueError(
            f"{type(objective).__name__}.loss left the running statistics as they were, such as '{expected[0]}'; call "
            "the module in its argument, not a copy, with train=True."
        )
