"""Exact nearest-neighbour search in float32, in chunks, over all devices of the current mesh.

Keys are split over the mesh's first axis, queries over the others.  Each device keeps the k best of its keys; the
overall best are among these.  On equal scores the earlier key is nearer, so up to rounding the result is independent of
chunks and devices.

The mean key is first subtracted from all vectors, in float64; for unit vectors q and k

    cos = 1 - |q - k|^2 / 2 = 1 - |q - m|^2 / 2 + ((q - m) (k - m) - |k - m|^2 / 2)

Features of an untrained model may differ by only 1e-5 of their length, and their cosines by 1e-10, which a float32
product of unit vectors cannot resolve.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from equivit import errors
from equivit.data.devices import scattered

Array = np.ndarray | jax.Array
DISTANCES = ("cosine", "L2")
KEYS, QUERIES = 65536, 1024  # largest chunk: 0.3 GB of scores
SMALLEST_NORM = 1e-12  # lower bound of the norm to divide by


class Found(NamedTuple):
    """The nearest keys of each query, nearest first."""

    scores: np.ndarray  # float32 [Q, k]: the cosine, or -|q - k|^2 / 2
    rows: np.ndarray  # int32 [Q, k], the rows of the keys


class Search:
    """A search among keys [N, D], which are moved to the devices once.

    The distance is "cosine", of the original vectors, or "L2".  Raises ValueError for an unknown distance, or keys that
    are not a matrix.
    """

    def __init__(self, keys: Array, distance: str = "cosine"):
        errors.one_of("neighbours: distance", distance, DISTANCES)
        if np.ndim(keys) != 2 or not np.size(keys):
            raise ValueError(f"neighbours: keys of shape {list(np.shape(keys))} must be [N, D], with at least one row.")
        self.distance, self.mesh, (self.number, self.width) = distance, jax.sharding.get_mesh(), keys.shape
        self.centre = sum(part.sum(0) for part in self._parts(keys)) / self.number
        prepared = self._prepared(keys)
        shards = 1 if self.mesh.empty else self.mesh.shape[self.mesh.axis_names[0]]
        each = -(-self.number // shards)
        chunks = -(-each // KEYS)
        shape, spec = (shards * chunks, -(-each // chunks)), PartitionSpec(*self.mesh.axis_names[:1])
        self.keys = scattered(_chunked(prepared, shape, 0), spec)
        self.bias = scattered(_chunked(_offset(prepared), shape, -np.inf), spec)

    def __call__(self, queries: Array, k: int) -> Found:
        """Find the k nearest keys of each query [Q, D]; ValueError for too few keys, or no queries of their width."""
        check_ks((k,), self.number)
        if np.shape(queries)[1:] != (self.width,) or not len(queries):
            raise ValueError(
                f"neighbours: queries of shape {list(np.shape(queries))} must be [Q, {self.width}] as the keys, with "
                "at least one row."
            )
        axes = self.mesh.axis_names[1:]
        parts = int(np.prod([self.mesh.shape[axis] for axis in axes]))
        size, found = -(-min(QUERIES, len(queries)) // parts) * parts, []
        for start in range(0, len(queries), size):
            rows = self._prepared(queries[start : start + size])
            padded = scattered(np.pad(rows, ((0, size - len(rows)), (0, 0))), PartitionSpec(axes))
            scores, places = jax.device_get(_nearest(k, self.mesh, self.keys, self.bias, padded))
            scores = scores[: len(rows)] + _offset(rows)[:, None]
            found.append((scores + 1 if self.distance == "cosine" else scores, places[: len(rows)]))
        return Found(*map(np.concatenate, zip(*found, strict=True)))

    def _prepared(self, x: Array) -> np.ndarray:
        return np.concatenate([(part - self.centre).astype(np.float32) for part in self._parts(x)])

    def _parts(self, x: Array) -> Iterator[np.ndarray]:
        """Yield rows in float64, in chunks, with length 1 for cosines."""
        for start in range(0, len(x), KEYS):
            part = np.asarray(x[start : start + KEYS], np.float64)
            length = np.linalg.norm(part, axis=-1, keepdims=True) if self.distance == "cosine" else 1
            yield part / np.maximum(length, SMALLEST_NORM)


def _offset(x: np.ndarray) -> np.ndarray:
    """-|x|^2 / 2 of each row."""
    return -(x**2).sum(-1) / 2


def check_ks(ks: Iterable[int], number: int) -> None:
    """ValueError unless there are enough keys for all requested numbers of neighbours."""
    if wrong := [k for k in ks if not 1 <= k <= number]:
        near = min(max(wrong[0], 1), number)
        raise ValueError(f"neighbours: k={wrong[0]} must be in 1..{number}, the number of keys; the nearest is {near}.")


def check_labels(labels: np.ndarray, num_classes: int, number: int) -> None:
    """ValueError unless there are `number` labels, in 0..num_classes - 1."""
    if labels.shape != (number,):
        raise ValueError(f"labels of shape {list(labels.shape)} must be one for each of the {number} features.")
    if (wrong := (labels < 0) | (labels >= num_classes)).any():
        raise ValueError(
            f"the label {labels[wrong][0]} is not in 0..{num_classes - 1}; correct the labels or the number of classes."
        )


def _chunked(x: np.ndarray, shape: tuple[int, int], fill: float) -> np.ndarray:
    """Split rows into chunks [chunks, size, ...], padded at the end."""
    missing = shape[0] * shape[1] - len(x)
    return np.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill).reshape(*shape, *x.shape[1:])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nearest(k: int, mesh: Any, keys: jax.Array, bias: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores and rows of the nearest, [Q, k], of keys [chunks, n, D] with bias [chunks, n]."""
    if mesh.empty:
        return _of_one_device(k, keys, bias, queries, jnp.int32(0))
    axis, *others = mesh.axis_names

    def local(keys, bias, queries):
        scores, rows = _of_one_device(k, keys, bias, queries, jax.lax.axis_index(axis) * bias.size)
        return _best(k, *(jax.lax.all_gather(part, axis, axis=1, tiled=True) for part in (scores, rows)))

    over_keys, over_queries = PartitionSpec(axis), PartitionSpec(tuple(others))
    found = jax.shard_map(
        local, mesh=mesh, in_specs=(over_keys, over_keys, over_queries), out_specs=over_queries, check_vma=False
    )(keys, bias, queries)
    return jax.lax.with_sharding_constraint(found, jax.sharding.NamedSharding(mesh, PartitionSpec()))


def _of_one_device(k, keys, bias, queries, first):
    """The same for this device's keys, which start at row `first`."""

    def step(best, chunk):
        keys, bias, start = chunk
        scores = jnp.matmul(queries, keys.T, precision="highest") + bias
        scores, places = jax.lax.top_k(scores, min(k, len(keys)))
        both = zip(best, (scores, start + places), strict=True)  # earlier keys first
        return _best(k, *(jnp.concatenate(parts, axis=1) for parts in both)), None

    shape = (len(queries), k)
    starts = first + jnp.arange(len(keys), dtype=jnp.int32) * keys.shape[1]
    begin = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    return jax.lax.scan(step, begin, (keys, bias, starts))[0]


def _best(k, scores, rows):
    scores, places = jax.lax.top_k(scores, k)
    return scores, jnp.take_along_axis(rows, places, axis=1)
