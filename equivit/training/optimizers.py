"""LAMB, LARS, AdamW and SGD as optax chains, with rules for each logical tensor.

A leaf may stack many tensors of a paper (blocks, irreps).  Clip groups, decay, trust ratios and learning-rate
multipliers are computed per slice, so a stacked model is optimised exactly like its unstacked tensors.
"""

import dataclasses
import fnmatch
import fractions
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from equivit import logical
from equivit.constraints import Below1, Inside, NonNegativeFloat, PositiveFloat, PositiveInt
from equivit.logical import Tensor
from equivit.objectives.objective import Rule
from equivit.training import freezing
from equivit.training.schedules import Schedule

Arrays = Mapping[str, jax.Array]
LARS_COEFFICIENT = 1e-3  # of the trust ratio


class Rules:
    """The rules of each leaf as arrays that broadcast against it.

    Args:
      rule: the rule of a logical tensor (`Objective.rule`).
      tables: the logical tensors of each leaf of the module (`logical.tensors`).
      trainable: the optimised leaves, which may be abstract.
      no_decay: shell patterns of logical names without weight decay; they override `rule`.
      layer_decay: the layer-wise decay of the learning rate (`layer_factor`); None for none.
      rates: factors of the learning rate by logical name (`rate_factors`), multiplied with the others.

    Raises ValueError if a factor is not a positive number, if a pattern matches no logical tensor, or if `layer_decay`
    is set for a model without blocks.
    """

    def __init__(
        self,
        rule: Callable[[Tensor], Rule],
        tables: Mapping[str, np.ndarray],
        trainable: Arrays,
        no_decay: tuple[str, ...] = (),
        layer_decay: float | None = None,
        rates: tuple[str, ...] = (),
    ):
        self.tables = tables
        everything = [tensor for table in tables.values() for tensor in table.flat]
        named = rate_factors(rates, [tensor.name for tensor in everything])
        for pattern in no_decay:
            freezing.matching("optimizer.no_decay", pattern, [tensor.name for tensor in everything])
        if layer_decay is not None and not any(tensor.layers == (0,) for tensor in everything):
            raise ValueError(
                f"optimizer.layer_decay={layer_decay}: no part of the model declares the layers before its blocks "
                "(`before`); set it to None."
            )

        def decays(tensor):
            of_tensor = rule(tensor)
            if of_tensor.frozen or not of_tensor.decay:
                return False
            return not any(fnmatch.fnmatchcase(tensor.name, pattern) for pattern in no_decay)

        def per_leaf(value):
            return {k: logical.per_tensor(tables[k], a, value) for k, a in trainable.items()}

        def rate(tensor):
            return rule(tensor).lr * layer_factor(tensor, layer_decay) * named.get(tensor.name, 1.0)

        self.lr = per_leaf(rate)
        self.decay = per_leaf(decays)
        self.matrix = per_leaf(lambda tensor: len(tensor.shape) > 1)
        self.clip = per_leaf(lambda tensor: rule(tensor).clip)
        self.starts = per_leaf(lambda tensor: rule(tensor).starts)
        self.masks = freezing.masks(rule, tables, trainable)

    def squares(self, leaf: str, array: jax.Array) -> jax.Array:
        """The sum of squares of each logical tensor of a leaf, shaped to broadcast against it."""
        return jnp.sum(jnp.square(array), axis=tuple(range(self.tables[leaf].ndim, array.ndim)), keepdims=True)


def layer_factor(tensor: Tensor, decay: float | None) -> float:
    """The factor of the learning rate, decay^(depth + 1 - layer) (Clark et al. 2020; BEiT, MAE).

    Layers before the blocks are layer 0, block i is layer i + 1, norm and head are layer depth + 1.  A module shared by
    all blocks (Jumbo's MLP) uses the mean of their rates; modules outside such a model (a decoder) use the full rate.
    """
    if decay is None or not tensor.layers:
        return 1.0
    return sum(decay ** (tensor.last - layer) for layer in tensor.layers) / len(tensor.layers)


def rate_factors(rates: Iterable[str], names: Iterable[str]) -> dict[str, float]:
    """The factors of `optimizer.rates`, such as "jumbo_mlp.*=1/6", by logical name; the last pattern decides.

    Raises ValueError if a factor is not a positive number or fraction, or if a pattern matches no name.
    """
    found, names = {}, list(names)
    for rate in rates:
        pattern, _, factor = rate.rpartition("=")
        try:
            value = float(fractions.Fraction(factor.strip()))
        except (ValueError, ZeroDivisionError):
            value = 0.0
        if not pattern or value <= 0:
            raise ValueError(
                f"optimizer.rates: {rate!r} must be a pattern of names and a positive factor, such as 'head.*=1/6'."
            )
        found |= dict.fromkeys(freezing.matching("optimizer.rates", pattern.strip(), names), value)
    return found


def create(
    config: ConfigDict,
    rule: Callable[[Tensor], Rule],
    tables: Mapping[str, np.ndarray],
    trainable: Arrays,
    lr: Schedule,
    weight_decay: Schedule,
) -> optax.GradientTransformationExtraArgs:
    """Create the optimiser of the `optimizer` section; `rule`, `tables` and `trainable` as in `Rules`.

    LAMB is You et al. (2020) as in apex's FusedLAMB and timm's Lamb: the trust ratio |p| / |u| applies to tensors with
    weight decay only.  LARS is You et al. (2017) as in the public MAE code for linear probes: the trust ratio
    0.001 |p| / |u| applies to tensors of two axes or more, and momentum accumulates u before the learning rate.
    "lars_optax" is `optax.lars`: the ratio applies to all tensors, and momentum accumulates u times the rate.
    Clipping divides by max(norm / clip, 1).

    State is stored by part name, and clipping and trust ratios have no state, so a resumed run may change them.

    `update` also takes `good`: whether the step keeps the new state (by default it does).
    """
    rules = Rules(rule, tables, trainable, tuple(config.no_decay), config.layer_decay, tuple(config.rates))
    parts = {"clip": _clip(rules, config.clip)} if config.clip else {}
    if config.name == "lars_optax":
        everywhere = dict.fromkeys(trainable, np.asarray(True))
        parts |= {"decay": _decay(rules, weight_decay), "trust": _trust_ratio(rules, everywhere, LARS_COEFFICIENT)}
        parts |= {"rate": _rate(rules, lr), "momentum": optax.trace(config.momentum)}
        return _only_trained(optax.named_chain(*parts.items()), rules)
    if config.name in ("sgd", "lars"):
        parts["decay"] = _decay(rules, weight_decay)
        if config.name == "lars":
            parts["trust"] = _trust_ratio(rules, rules.matrix, LARS_COEFFICIENT)
        parts["momentum"] = optax.trace(config.momentum)
    else:
        parts |= {"adam": _adam(*config.betas, eps=config.eps), "decay": _decay(rules, weight_decay)}
    if config.name == "lamb" and (config.weight_decay or config.get("weight_decay_end")):
        parts["trust"] = _trust_ratio(rules, rules.decay)
    parts["rate"] = _rate(rules, lr)
    return _only_trained(optax.named_chain(*parts.items()), rules)


def updates(state: Any) -> int:
    """The number of updates that the state of an optimiser has made, which schedules count."""
    return int(state["rate"].count)


def _clip(rules: Rules, largest: float) -> optax.GradientTransformation:
    """Scale the gradients of each clip group so that their common norm is at most `largest`."""
    groups = sorted({str(group) for table in rules.clip.values() for group in table.reshape(-1)})
    members = {k: {g: np.asarray(table == g, np.float32) for g in groups} for k, table in rules.clip.items()}

    def update(gradients, params):
        squares = {k: rules.squares(k, g) for k, g in gradients.items()}
        factor = {}
        for group in groups:
            norm = jnp.sqrt(sum(jnp.sum(squares[k] * members[k][group]) for k in squares))
            factor[group] = 1 / jnp.maximum(norm / largest, 1)
        return {k: g * sum(members[k][group] * factor[group] for group in groups) for k, g in gradients.items()}

    return optax.stateless(update)


def _adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Scale like optax.scale_by_adam, with the bias corrections 1 - beta^t exact in float32.

    Computed as a difference, 1 - 0.999 has a relative error of 1.3e-5 in float32, and so would the first updates.

    Updates use the moments that the step keeps, so XLA:CPU reads them in place.  If the choice came later, it would
    compute a second pair of moments from copies of the old ones, held for the whole step.
    """

    def correction(beta, t):
        return -jnp.expm1(t * math.log(beta)) if beta else 1.0

    def update(updates, state, params=None, *, good=True):
        t = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, beta2, 2)
        scale1, scale2 = 1 / correction(beta1, t), 1 / jnp.sqrt(correction(beta2, t))
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), (mu, nu), (state.mu, state.nu))
        updates = jax.tree.map(lambda m, v: m * scale1 / (jnp.sqrt(v) * scale2 + eps), *kept)
        return updates, optax.ScaleByAdamState(t, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def _decay(rules: Rules, weight_decay: Schedule) -> optax.GradientTransformation:
    """Add weight_decay * parameter to tensors with decay."""

    def change(step, updates, params):
        strength = weight_decay(step)
        return {k: u + strength * jnp.where(rules.decay[k], params[k], 0) for k, u in updates.items()}

    return _by_step(change)


def _trust_ratio(
    rules: Rules, where: Mapping[str, np.ndarray], coefficient: float = 1.0
) -> optax.GradientTransformation:
    """Multiply the update u of each tensor in `where` by coefficient |p| / |u|, or by 1 where either norm is 0."""

    def update(updates, params):
        p, u = ({k: jnp.sqrt(rules.squares(k, tree[k])) for k in updates} for tree in (params, updates))
        some = {k: where[k] & (p[k] > 0) & (u[k] > 0) for k in updates}
        ratio = {k: coefficient * p[k] / jnp.where(u[k] > 0, u[k], 1) for k in updates}
        return {k: updates[k] * jnp.where(some[k], ratio[k], 1) for k in updates}

    return optax.stateless(update)


def _rate(rules: Rules, lr: Schedule) -> optax.GradientTransformation:
    """Multiply by minus the learning rate and by the factor of each tensor, which is 0 before the tensor starts."""

    def change(step, updates, params):
        rate = lr(step)
        return {k: -rate * u * factor(step, k).astype(u.dtype) for k, u in updates.items()}

    def factor(step, k):
        return jnp.where(step >= rules.starts[k], rules.lr[k], 0.0) if rules.starts[k].any() else rules.lr[k]

    return _by_step(change)


def _by_step(change: Callable[[jax.Array, Arrays, Arrays], Arrays]) -> optax.GradientTransformation:
    """Turn `change(step, updates, params)` into a transformation whose step counts the updates made."""

    def update(updates, state, params: Any = None):
        return change(state.count, updates, params), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(jnp.int32(0)), update)


def _only_trained(chain, rules: Rules) -> optax.GradientTransformationExtraArgs:
    """Exclude frozen slices of stacked leaves from norms and updates."""

    def update(updates, state, params=None, **extra):
        updates, state = chain.update(freezing.masked(updates, rules.masks), state, params, **extra)
        return freezing.masked(updates, rules.masks), state

    return optax.GradientTransformationExtraArgs(chain.init, update) if rules.masks else chain


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The `optimizer` section of a configuration."""

    name: Literal["lamb", "lars", "lars_optax", "adamw", "sgd"] = "lamb"
    weight_decay: NonNegativeFloat = 0.02
    weight_decay_end: NonNegativeFloat | None = None  # final value of a cosine over the run; None: constant
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    clip: PositiveFloat | None = 1.0  # largest global norm of the gradients; None: no clipping
    momentum: Below1 = 0.9  # sgd and both kinds of lars only
    accumulation: PositiveInt = 1  # micro-batches per step
    no_decay: tuple[str, ...] | tuple[()] = ()  # patterns of logical names, such as "head.*", besides the objective's
    # Patterns of frozen logical names (training/freezing.py): ("*", "!head.*") trains the head alone.
    freeze: tuple[str, ...] | tuple[()] = ()
    layer_decay: Inside | None = None  # factor of the learning rate per layer, from the head backwards; such as 0.75
    rates: tuple[str, ...] | tuple[()] = ()  # factors of the learning rate by logical name, such as "head.*=1/6"
