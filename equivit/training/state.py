"""The train state, and the pure step that takes it forward."""

import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from equivit import logical
from equivit.objectives.objective import Batch, Extra, Objective, Trainable
from equivit.training import sharding


class State(NamedTuple):
    """All that a run needs to go on.  `good` is False from the first loss or gradient that is not finite."""

    step: jax.Array  # int32: finished steps
    good: jax.Array  # bool
    trainable: Trainable
    extra: Extra
    optimizer: Any


class Program(NamedTuple):
    """A compiled run: the state's shapes and places, how to begin, and one step."""

    abstract: State  # ShapeDtypeStructs with their shardings
    init: Callable[[dict[str, jax.Array]], State]  # from parameters that replace the drawn ones, or {}
    step: Callable[[State, Batch, Hashable], tuple[State, dict[str, jax.Array]]]


def compile_program(
    objective: Objective,
    make_model: Callable[[nnx.Rngs], nnx.Module],
    make_optimizer: Callable[[Trainable], optax.GradientTransformation],
    mesh: Mesh,
    *,
    seed: int,
    accumulation: int = 1,
    frozen: Mapping[str, nnx.Module] = types.MappingProxyType({}),
) -> Program:
    """Place the state on the mesh by rule, and compile its beginning and its step.

    The arrays of `frozen` go along in `extra["frozen"]`; the models may be abstract if the program is only lowered.
    """
    frozen = {name: {**logical.take(model), **logical.take_state(model)} for name, model in frozen.items()}

    def init_objective(arrays):
        model_key, objective_key = jax.random.split(jax.random.key(seed))
        return objective.init(logical.put(make_model(nnx.Rngs(model_key)), arrays), objective_key)

    optimizer = make_optimizer(jax.eval_shape(init_objective, {})[0])  # also lets the objective know its names

    def init(arrays, frozen):
        trainable, extra = init_objective(arrays)
        extra = extra if not frozen else {**extra, "frozen": frozen}
        state = State(jnp.int32(0), jnp.bool_(True), trainable, extra, optimizer.init(trainable))
        return jax.tree.map(lambda a: jnp.asarray(a, a.dtype), state)  # a weak type would compile the step twice

    abstract = jax.eval_shape(init, {}, frozen)
    stack_axes = {leaf: table.ndim for leaf, table in objective.names().items()}
    shardings = sharding.of_tree(mesh, abstract, stack_axes)
    everywhere = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        make_step(objective, optimizer, seed=seed, accumulation=accumulation),
        static_argnums=2,
        donate_argnums=0,
        in_shardings=(shardings, NamedSharding(mesh, sharding.BATCH)),
        out_shardings=(shardings, everywhere),
    )
    placed = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
    begin = jax.jit(init, out_shardings=shardings)
    # `frozen` is an argument, since a constant would be part of the program, and a copy, since steps donate it.
    return Program(placed, lambda arrays: begin(arrays, jax.device_get(frozen)), step)


def make_step(objective: Objective, optimizer: optax.GradientTransformation, *, seed: int, accumulation: int):
    """`step(state, batch, static) -> state, metrics`.

    The batch is prepared (mixed, masked) whole and then cut into `accumulation` micro-batches, so that mixing does not
    depend on their number.  A step whose loss or gradient is not finite changes nothing, nor does any after it: the
    state stays the last good one, and `metrics["good"]` says so.
    """

    def step(state: State, batch: Batch, static: Hashable):
        prepare_key, loss_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step))
        batch = objective.prepare(batch, prepare_key)
        loss, metrics, extra, gradients = _gradients(objective, state, batch, loss_key, static, accumulation)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        extra = objective.after_step(trainable, extra, state.step + 1)
        norm = optax.tree.norm(gradients)
        good = state.good & jnp.isfinite(loss) & jnp.isfinite(norm)
        after = State(state.step + 1, good, trainable, extra, optimizer_state)
        after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, state._replace(good=good))
        return after, {**metrics, "loss": loss, "grad_norm": norm, "good": good}

    return step


def _gradients(objective, state, batch, key, static, accumulation):
    """Means over the micro-batches of loss, metrics and gradients; `extra` passes from one to the next."""

    def one(extra, part):
        index, batch = part
        gradient = jax.value_and_grad(objective.loss, has_aux=True)
        key_of_part = jax.random.fold_in(key, index)
        (loss, (metrics, extra)), gradients = gradient(state.trainable, extra, batch, key_of_part, state.step, static)
        return extra, (loss, metrics, gradients)

    if accumulation == 1:
        extra, (loss, metrics, gradients) = one(state.extra, (0, batch))
        return loss, metrics, extra, gradients

    def add(carry, part):
        extra, total = carry
        extra, result = one(extra, part)
        return (extra, jax.tree.map(jnp.add, total, result)), None

    parts = (jnp.arange(accumulation), jax.tree.map(lambda rows: _cut(rows, accumulation), batch))
    shapes = jax.eval_shape(lambda p: one(state.extra, jax.tree.map(lambda a: a[0], p))[1], parts)
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    (extra, total), _ = jax.lax.scan(add, (state.extra, nothing), parts)
    loss, metrics, gradients = jax.tree.map(lambda a: a / accumulation, total)
    return loss, metrics, extra, gradients


def _cut(rows, parts):
    """[B, ...] -> [parts, B / parts, ...]; every part takes rows of every device, so that none moves."""
    rows = jnp.moveaxis(rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]), 1, 0)
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(None, *sharding.BATCH))
