"""DINOv2's linear probe: many linear classifiers on frozen features, trained in parallel.

A head reads the class tokens of the last n blocks, earliest first, and optionally the mean patch token of the last one.
Each of these inputs has one independent head per learning rate:

    v <- 0.9 v + g,    w <- w - r_t v,    r_t = base * batch_size / 256 * (1 + cos(pi t / steps)) / 2

with the mean cross-entropy of a batch, no weight decay and no warm-up.

Source: DINOv2 (arXiv 2304.07193), Appendix B.3, and its public code: n = 1 or 4, without and with the mean patch token,
and 13 base rates, which makes 52 heads; 12,500 steps of 1024 images.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from equivit.evaluation.neighbours import Array, check_labels

BASE_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
MOMENTUM, WEIGHT_STD = 0.9, 0.01
REFERENCE_BATCH = 256  # the batch size of the base rates
State = Mapping[str, Array]  # "step", "losses", and the arrays of each input by name; np.savez can store it


class Input(NamedTuple):
    """The input of heads: the class tokens of `blocks` last blocks and, optionally, the mean patch token."""

    blocks: int
    average: bool

    @property
    def name(self) -> str:
        """A name such as "n4_avg1"."""
        return f"n{self.blocks}_avg{int(self.average)}"


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads and their training; ValueError if two have the same name, or there are no heads or no steps."""

    num_classes: int  # labels are 0..num_classes - 1
    base_rates: tuple[float, ...]  # the learning rates at a batch of 256
    batch_size: int  # images in a batch, over all devices
    steps: int
    blocks: tuple[int, ...] = (1, 4)  # numbers of last blocks whose class tokens heads read
    averages: tuple[bool, ...] = (False, True)  # whether heads read the mean patch token

    def __post_init__(self):
        if not self.names:
            settings = f"base_rates={self.base_rates}, blocks={self.blocks} and averages={self.averages}"
            raise ValueError(f"linear probe: {settings} make no head; give at least one of each.")
        if self.steps < 1 or min(self.blocks) < 1:
            raise ValueError(f"linear probe: steps={self.steps} and blocks={self.blocks} must be positive.")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"linear probe: the heads {', '.join(self.names)} must differ; name each rate once.")

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs of the heads, in their order."""
        return tuple(Input(blocks, average) for blocks in self.blocks for average in self.averages)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the heads, such as "n1_avg0_lr0.001"; rates vary fastest."""
        return tuple(f"{of.name}_lr{rate:g}" for of in self.inputs for rate in self.base_rates)


@dataclasses.dataclass(frozen=True)
class Probe:
    """Trained heads."""

    heads: Heads
    # By input, the weights [rates, F, classes] and biases [rates, classes] of its heads.
    stacked: Mapping[str, tuple[np.ndarray, np.ndarray]]
    losses: np.ndarray  # float32 [steps, heads], each before its step

    def head(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The weight [F, classes] and the bias [classes] of a head."""
        place, rate = divmod(number, len(self.heads.base_rates))
        weight, bias = self.stacked[self.heads.inputs[place].name]
        return weight[rate], bias[rate]

    def logits(self, class_tokens: Array, patch_tokens: Array) -> jax.Array:
        """Logits, float32 [heads, B, classes]; arguments as in `probe_input`."""
        return _logits(self.heads.inputs, dict(self.stacked), class_tokens, patch_tokens)


def probe_input(class_tokens: Array, patch_tokens: Array, blocks: int, average: bool) -> jax.Array:
    """Compute the input of a head, float32 [B, F].

    Args:
      class_tokens: [n, B, D], of the last n blocks, earliest first.
      patch_tokens: [B, N, D], of the last block.
      blocks: the number of last blocks, at most n.
      average: also the mean patch token, after the class tokens.

    Raises ValueError if there are fewer blocks.
    """
    if not 1 <= blocks <= len(class_tokens):
        raise ValueError(f"linear probe: blocks={blocks} must be in 1..{len(class_tokens)}, those with class tokens.")
    parts = [jnp.asarray(token, jnp.float32) for token in class_tokens[len(class_tokens) - blocks :]]
    return jnp.concatenate(parts + [jnp.asarray(patch_tokens, jnp.float32).mean(1)] * average, axis=-1)


def fit(
    batches: Iterable[tuple[Array, Array, Array]],
    heads: Heads,
    *,
    initial: Mapping[str, Array] | None = None,
    key: jax.Array | None = None,
    state: State | None = None,
    watch: Callable[[int, State], None] | None = None,
) -> Probe:
    """Train all heads.

    Args:
      batches: class tokens, patch tokens (as in `probe_input`) and labels int [B] of at least `heads.steps` batches.
      initial: initial weights [F, classes] by head; None: normal, with standard deviation 0.01.  Biases start at zero.
      key: the key of random weights; None: `jax.random.key(0)`.
      state: the last state passed to `watch` in an interrupted run; `batches` then start at number state["step"].
      watch: `watch(step, state)` is called after each step, for example to save the state with np.savez.

    Raises ValueError for a label beyond the classes, more blocks than tokens, too few batches, or initial weights that
    are missing or have another shape.
    """
    now, step = (None, 0) if state is None else (state, int(state["step"]))
    for class_tokens, patch_tokens, labels in itertools.islice(batches, heads.steps - step):
        if not isinstance(labels, jax.Array) or labels.is_fully_addressable:
            check_labels(np.asarray(labels), heads.num_classes, class_tokens.shape[1])
        if now is None:
            now = _start(heads, class_tokens, patch_tokens, initial, jax.random.key(0) if key is None else key)
        now, step = _step(heads, dict(now), class_tokens, patch_tokens, labels), step + 1
        if watch is not None:
            watch(step, now)
    if now is None or step < heads.steps:
        raise ValueError(f"linear probe: there are {step} batches, and steps={heads.steps}; give more of them.")
    end = multihost_utils.process_allgather(now, tiled=True)
    stacked = {of.name: (end[f"{of.name}/weight"], end[f"{of.name}/bias"]) for of in heads.inputs}
    return Probe(heads, stacked, end["losses"])


def _start(heads: Heads, class_tokens: Array, patch_tokens: Array, initial: Any, key: jax.Array) -> dict[str, Array]:
    """The state before the first step."""
    state: dict[str, Array] = {
        "step": np.array(0, np.int32),
        "losses": np.zeros((heads.steps, len(heads.names)), np.float32),
    }
    for number, of in enumerate(heads.inputs):
        width = jax.eval_shape(lambda *x, of=of: probe_input(*x, *of), class_tokens, patch_tokens).shape[-1]
        shape = (len(heads.base_rates), width, heads.num_classes)
        if initial is None:
            weight = WEIGHT_STD * jax.random.normal(jax.random.fold_in(key, number), shape)
        else:
            weight = np.stack([_initial(initial, f"{of.name}_lr{rate:g}", shape[1:]) for rate in heads.base_rates])
        bias = np.zeros((shape[0], shape[2]), np.float32)
        state |= {f"{of.name}/weight": weight, f"{of.name}/bias": bias}
        state |= {f"{of.name}/weight_moment": np.zeros(shape, np.float32), f"{of.name}/bias_moment": bias}
    return state


def _initial(initial: Mapping[str, Array], name: str, shape: tuple[int, int]) -> np.ndarray:
    """The initial weights of a head; ValueError if they are missing or have another shape."""
    weight = initial.get(name)
    if weight is None or np.shape(weight) != shape:
        found = "missing" if weight is None else f"of shape {list(np.shape(weight))}"
        raise ValueError(f"linear probe: initial[{name!r}] is {found} and must be {list(shape)}.")
    return np.asarray(weight, np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _step(heads: Heads, state: State, class_tokens: Array, patch_tokens: Array, labels: Array) -> dict[str, jax.Array]:
    """The state after one batch."""

    def total(stacked):
        logits = _logits(heads.inputs, stacked, class_tokens, patch_tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[None]).mean(1)
        return losses.sum(), losses

    stacked = {of.name: (state[f"{of.name}/weight"], state[f"{of.name}/bias"]) for of in heads.inputs}
    (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(stacked)
    step = jnp.asarray(state["step"])
    decay = (1 + jnp.cos(jnp.pi * step / heads.steps)) / 2
    rates = np.array(heads.base_rates, np.float32) * (heads.batch_size / REFERENCE_BATCH) * decay
    after = {"step": step + 1, "losses": jnp.asarray(state["losses"]).at[step].set(losses)}
    for of in heads.inputs:
        for part, gradient in zip(("weight", "bias"), gradients[of.name], strict=True):
            name = f"{of.name}/{part}"
            moment = MOMENTUM * state[f"{name}_moment"] + gradient
            rate = rates.reshape(-1, *(1,) * (moment.ndim - 1))
            after |= {name: state[name] - rate * moment, f"{name}_moment": moment}
    return after


@functools.partial(jax.jit, static_argnums=0)
def _logits(inputs: tuple[Input, ...], stacked: Any, class_tokens: Array, patch_tokens: Array) -> jax.Array:
    """The logits of all heads, [heads, B, classes]."""
    found = []
    for of in inputs:
        x, (weight, bias) = probe_input(class_tokens, patch_tokens, *of), stacked[of.name]
        found.append(jnp.einsum("bf,rfk->rbk", x, weight, precision="highest") + bias[:, None])
    return jnp.concatenate(found)
