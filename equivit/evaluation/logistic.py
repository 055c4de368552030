"""Multinomial logistic regression, in float32 on the devices of the current mesh.

    minimise  sum_i CE_i + |W|^2 / (2 C)

over weights W and unpenalised intercepts, from zero, by L-BFGS: at most 1000 iterations, stopping after 10 without
progress.  Progress is a lower loss or, if float32 cannot resolve the difference, a smaller gradient.  With a large C
the result may not reach the minimum, which lies far away.

Source: CAPI's and DinoBloom's evaluations, which call cuML and scikit-learn; the minima agree with theirs to 1e-3.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from equivit.data.devices import scattered
from equivit.evaluation.neighbours import Array

ITERATIONS, PATIENCE = 1000, 10
NOISE = 4 * float(np.finfo(np.float32).eps)  # relative noise of a loss
MEMORY, LINE_SEARCH_STEPS = 5, 50


@dataclasses.dataclass(frozen=True)
class Logistic:
    """A fitted regression."""

    classes: np.ndarray  # int [K], the known labels, in increasing order
    coef: np.ndarray  # float32 [K, D]
    intercept: np.ndarray  # float32 [K], of mean 0
    iterations: int  # the number of L-BFGS iterations
    gradient: float  # the norm of the final gradient, of the loss per example

    def probabilities(self, features: Array) -> np.ndarray:
        """Class probabilities, float32 [..., K], of features [..., D]."""
        logits = self._logits(features)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)

    def predict(self, features: Array) -> np.ndarray:
        """The likeliest label of features [..., D]."""
        return self.classes[self._logits(features).argmax(-1)]

    def _logits(self, features: Array) -> np.ndarray:
        return np.asarray(features, np.float32) @ self.coef.T + self.intercept


def fit(features: Array, labels: Array, *, C: float) -> Logistic:
    """Fit a regression of labels int [N] on features [N, D]; C is the inverse strength of the penalty.

    Raises ValueError if C is not positive, there are no features, or they are not finite.
    """
    features, labels = np.asarray(features, np.float32), np.asarray(labels)
    if not C > 0:
        raise ValueError(f"logistic regression: C={C} must be positive.")
    if not len(features) or not np.isfinite(features).all():
        raise ValueError(f"logistic regression: features of shape {list(features.shape)} must be finite, at least one.")
    classes, targets = np.unique(labels, return_inverse=True)
    mesh = jax.sharding.get_mesh()
    missing = -len(features) % (1 if mesh.empty else mesh.size)
    rows = PartitionSpec(mesh.axis_names)
    x = scattered(np.pad(features, ((0, missing), (0, 0))), rows)
    y = scattered(np.pad(targets.astype(np.int32), (0, missing), constant_values=-1), rows)
    weight = np.zeros((len(classes), features.shape[1]), np.float32)
    found = _minimum(weight, x, y, np.float32(1 / (2 * C * len(features))), np.float32(len(features)))
    (weight, intercept), iterations, gradient = multihost_utils.process_allgather(found, tiled=True)
    return Logistic(classes, weight, intercept - intercept.mean(), int(iterations), float(gradient))


@jax.jit
def _minimum(weight, x, y, penalty, number) -> tuple[Any, jax.Array, jax.Array]:
    """Find weights and intercepts, the iterations and the norm of the gradient; targets of -1 are ignored."""

    def loss(parameters):
        weight, intercept = parameters
        logits = jnp.matmul(x, weight.T, precision="highest") + intercept
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0))
        return jnp.sum(each, where=y >= 0) / number + penalty * jnp.sum(weight**2)

    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=LINE_SEARCH_STEPS, initial_guess_strategy="one")
    solver = optax.lbfgs(memory_size=MEMORY, linesearch=search)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry):
        parameters, state, best, idle, count = carry
        value, gradient = value_and_grad(parameters, state=state)
        norm = optax.tree.norm(gradient)
        noise = NOISE * jnp.abs(value)
        better = (value < best[0] - noise) | ((value <= best[0] + noise) & (norm < best[1]))
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), (value, norm, parameters), best)
        updates, state = solver.update(gradient, state, parameters, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(parameters, updates), state, best, jnp.where(better, 0, idle + 1), count + 1

    def unfinished(carry):
        *_, idle, count = carry
        return (idle < PATIENCE) & (count < ITERATIONS)

    begin = weight, jnp.zeros(len(weight), weight.dtype)
    nothing = (jnp.float32(jnp.inf), jnp.float32(jnp.inf), begin)
    carry = (begin, solver.init(begin), nothing, jnp.int32(0), jnp.int32(0))
    _, _, (_, gradient, found), _, count = jax.lax.while_loop(unfinished, step, carry)
    return found, count, gradient
