"""A sweep: one model on one data set with several learning rates and dropout rates.

A run is a pure function of three arrays: its learning rate, its dropout rate and its seed.  `jax.vmap` over them fills
an accelerator with twelve small runs.  On a CPU the program alternates between runs, an epoch each, because the arrays
of one run fit into the cache; under `vmap` twelve runs took 2.5 times as long.  All runs see the same batches.  Each
has its own initial weights and dropout, so run k of a sweep equals the same run alone, up to rounding.

Source of the recipe: Jumbo, Appendix A.3.2.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import logical
from equivit.data.series import SeriesData, Split
from equivit.layers.rngs import Keys
from equivit.objectives.objective import Batch, Loss, Objective, Step, classification
from equivit.training import freezing, optimizers, schedules
from equivit.training.state import State, begin, make_step

EVALUATED_TOGETHER = 256  # series per evaluation batch


class Run(NamedTuple):
    """The parameters of a run, scalars; for all runs of a sweep, arrays [R]."""

    lr: jax.Array  # at the end of the warm-up
    dropout: jax.Array
    seed: jax.Array  # uint32


class Figures(NamedTuple):
    """The accuracy and the loss of a model on a split."""

    accuracy: jax.Array
    loss: jax.Array


class SeriesClassification(Objective):
    """The cross-entropy of a batch with "series" [B, T, channels], preprocessed before training, and "label" [B].

    Args:
      config: the configuration of a sweep (`training/sweep_config.py`).
      dropout: probability, which overrides the model's; may be traced, so that one program serves many values.
    """

    def __init__(self, config: ConfigDict, *, dropout: float | jax.Array):
        super().__init__(config)
        self._dropout = dropout

    def prepare(self, module: nnx.Module, batch: Batch, key: jax.Array) -> Batch:
        """Return the batch as it is."""
        return batch

    def loss(self, module: nnx.Module, batch: Batch, step: Step) -> Loss:
        """The cross-entropy and the accuracy."""
        logits = module(batch["series"], key=step.key, train=True, dropout=self._dropout).astype(jnp.float32)
        return classification(logits, batch["label"])


def grid(lr: tuple[float, ...], dropout: tuple[float, ...], seed: int) -> Run:
    """The Cartesian product of the rates as one sweep; every run has its own seed."""
    lrs, rates = zip(*itertools.product(lr, dropout), strict=True)
    seeds = np.random.SeedSequence(seed).generate_state(len(lrs))
    return Run(jnp.float32(lrs), jnp.float32(rates), jnp.asarray(seeds))


class Sweep:
    """The pure functions of one run: `init`, `epoch` and `evaluate`.

    Args:
      examples: the number of training series; an epoch ends with a smaller batch if `batch_size` does not divide it.
      epochs: length of a run.
      together: runs under one `vmap`; None: one on a CPU, otherwise all.
    """

    def __init__(
        self,
        config: ConfigDict,
        make_model: Callable[[nnx.Rngs], nnx.Module],
        *,
        examples: int,
        epochs: int,
        together: int | None = None,
    ):
        self._config, self._make_model, self._together = config, make_model, together
        self._model = jax.eval_shape(lambda: make_model(Keys(0)))
        self._per_epoch = -(-examples // config.batch_size)
        self._steps = epochs * self._per_epoch

    def init(self, run: Run) -> State:
        """The state before the first step."""
        objective, optimizer = self._parts(run)
        return begin(objective, self._make_model(Keys(jax.random.key(run.seed))), optimizer)

    def epoch(self, run: Run, state: State, data: Batch, order: jax.Array) -> tuple[State, jax.Array]:
        """One pass over `data` with its rows in the given order [N]; the state after it, and the mean loss."""
        length = dict(total=self._steps, per_epoch=self._per_epoch)
        objective, optimizer = self._parts(run)
        step = make_step(objective, self._model, optimizer, seed=run.seed, **length)

        def take(state, rows):
            state, metrics = step(state, {}, {name: array[rows] for name, array in data.items()}, None)
            return state, metrics["loss"] * len(rows)

        size, total = self._config.batch_size, jnp.float32(0)
        whole = len(order) // size * size
        if whole:
            state, losses = jax.lax.scan(take, state, order[:whole].reshape(-1, size))
            total += losses.sum()
        if whole < len(order):
            state, last = take(state, order[whole:])
            total += last
        return state, total / len(order)

    def evaluate(self, state: State, data: Batch) -> Figures:
        """Accuracy and loss on a split."""
        model = logical.put(self._model, state.arrays)
        logits = jax.lax.map(model, data["series"], batch_size=EVALUATED_TOGETHER).astype(jnp.float32)
        loss, metrics, _ = classification(logits, data["label"])
        return Figures(metrics["accuracy"], loss)

    @functools.cached_property
    def of_all(self) -> tuple[Callable, Callable, Callable]:
        """`init`, `epoch` and `evaluate` for all runs of a sweep, compiled; `epoch` donates its state."""

        def epoch(runs, state, data, order):
            return self._map(lambda one: self.epoch(one[0], one[1], data, order), (runs, state))

        def evaluate(state, data):
            return self._map(lambda one: self.evaluate(one, data), state)

        init = functools.partial(self._map, self.init)
        return jax.jit(init), jax.jit(epoch, donate_argnums=1), jax.jit(evaluate)

    def _map(self, function, runs):
        together = self._together or (1 if jax.default_backend() == "cpu" else len(jax.tree.leaves(runs)[0]))
        return jax.lax.map(function, runs, batch_size=together)

    def _parts(self, run):
        objective = SeriesClassification(self._config, dropout=run.dropout)
        schedule = schedule_section(self._config.schedule, run.lr, self._steps)
        lr = schedules.create(schedule, total_steps=self._steps, steps_per_epoch=self._per_epoch)
        weight_decay = schedules.weight_decay(self._config.optimizer, total_steps=self._steps)
        trainable, tables = jax.eval_shape(logical.take, self._model), logical.tensors(self._model)
        section, rule = self._config.optimizer, freezing.rule(objective, tables)
        return objective, optimizers.create(section, rule, tables, trainable, lr, weight_decay)


def schedule_section(config: ConfigDict, lr: float | jax.Array, steps: int) -> ConfigDict:
    """The section for `schedules.create`: linear from 0 for the fraction `warmup` of the steps, then cosine."""
    changes = dict(lr=lr, min_lr=config.min_lr, warmup_lr=0.0, warmup_steps=round(config.warmup * steps))
    return ConfigDict({**dataclasses.asdict(schedules.ScheduleConfig()), **changes})


def train(
    program: Sweep,
    runs: Run,
    data: SeriesData,
    *,
    epochs: int,
    seed: int,
    report: Callable[[int, np.ndarray], None] = lambda epoch, losses: None,
) -> tuple[State, dict[str, Figures]]:
    """Train all runs together; the final states and the figures on validation and test, each leaf [R, ...].

    `seed` determines the order of the series in each epoch, the same for all runs.  `report(epoch, losses [R])` is
    called after each epoch.
    """
    splits = {name: _on_device(getattr(data, name)) for name in ("train", "validation", "test")}
    init, epoch, evaluate = program.of_all
    state, key = init(runs), jax.random.key(seed)
    permute = jax.jit(functools.partial(jax.random.permutation, x=len(data.train.labels)))
    for i in range(epochs):
        state, losses = epoch(runs, state, splits["train"], permute(jax.random.fold_in(key, i)))
        report(i, np.asarray(losses))
    return state, {name: evaluate(state, splits[name]) for name in ("validation", "test")}


def best(validation: Figures) -> int:
    """The run to report: the best validation accuracy, then the lowest loss."""
    accuracy, loss = np.asarray(validation.accuracy), np.asarray(validation.loss)
    return int(np.lexsort((loss, -accuracy))[0])


def _on_device(split: Split) -> Batch:
    return {"series": jnp.asarray(split.series), "label": jnp.asarray(split.labels)}
