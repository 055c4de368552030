"""Choice of an operation's implementation by name or platform, and sharding over a mesh.

A field's arrays have batch, tokens and channels as their last three axes, [k, *B, N, c].  Kernels see the arrays of one
device; weights are replicated on every device.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from equivit.kernels import gpus

IMPLEMENTATIONS = ("auto", "reference", "xla", "tpu", "gpu", "cpu", "interpret")
# The kernels of "auto", by platform of `jax.lax.platform_dependent`: only kernels that have run on such a chip.
PLATFORMS = {"cuda": "gpu"}
BATCH_AXES = ("data", "hosts", "fsdp")  # mesh axes that the batch is sharded over
AUTO = contextvars.ContextVar("implementation", default="auto")  # the meaning of "auto", set by `using`
FUSED = ("tpu", "gpu", "interpret")  # have kernels for whole branches, which have not yet run on a chip


@contextlib.contextmanager
def using(implementation: str) -> Iterator[None]:
    """A context in which "auto" means `implementation`, for every operation traced inside it.

        with kernels.using("xla"):
            exported = jax.export.export(jax.jit(model), platforms=("cpu", "cuda"))(images)

    A function that was traced earlier keeps its implementation.

    Raises:
      ValueError: an unknown implementation.
    """
    token = AUTO.set(resolve("kernels.using", implementation))
    try:
        yield
    finally:
        AUTO.reset(token)


def resolve(name: str, implementation: str) -> str:
    """Resolve "auto" by `using`; ValueError unless `implementation` is one of IMPLEMENTATIONS."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{name}: {implementation=} is not one of {', '.join(map(repr, IMPLEMENTATIONS))}.")
    return AUTO.get() if implementation == "auto" else implementation


def lacks(asked: str, chosen: str, kernels: dict[str, Callable | None]) -> bool:
    """Whether `using` asks for a kernel that does not exist, or not for this GPU: the operation uses the reference."""
    return asked == "auto" != chosen and (kernels.get(chosen) is None or chosen == "gpu" and not hopper())


def by_implementation(tpu: Callable | None, gpu: Callable | None = None) -> dict[str, Callable | None]:
    """The kernels of an operation; the one for TPUs also runs interpreted, with `interpret=True`."""
    return {"tpu": tpu, "interpret": tpu and functools.partial(tpu, interpret=True), "gpu": gpu}


def check_field(name: str, lines: jax.Array, planes: jax.Array) -> None:
    """ValueError unless the arrays are an octic field, lines [4, *B, N, C] and planes [2, *B, N, 2C], of one dtype."""
    expected = (2, *lines.shape[1:-1], 2 * lines.shape[-1]) if lines.ndim else ()
    if lines.ndim < 3 or lines.shape[0] != 4 or planes.shape != expected:
        hint = f"; for these lines, planes must be {expected}" if lines.ndim > 2 and len(lines) == 4 else ""
        raise ValueError(
            f"{name}: {lines.shape} and {planes.shape} are not the shapes of an octic field, lines [4, *B, N, C] and "
            f"planes [2, *B, N, 2C]{hint}."
        )
    if lines.dtype != planes.dtype:
        raise ValueError(
            f"{name}: lines are {lines.dtype} and planes {planes.dtype}; a field has one dtype: cast one of them."
        )


def run(
    name: str,
    implementation: str,
    plain: Callable,
    kernels: dict[str, Callable | None],
    fields: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """Apply an operation to `(*fields, *weights)`; the results are arrays of fields.

    It has no derivative: each operation defines its own.  Under `jax.vmap` the new axis becomes a batch axis of the
    fields, so that a kernel sees one larger batch.

    Args:
      name: of the operation, for errors.
      implementation: any but "xla".
      plain: the operation in plain jnp, for any shape and dtype.
      kernels: the kernel for one device by implementation, or None if it does not support the shapes or dtypes.
      fields: arrays [k, *B, N, c].
      weights: arrays of any shape.

    Raises:
      ValueError: the requested kernel does not support the shapes or dtypes.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        on_shards = functools.partial(
            _on_shards, plain=plain, fields=arrays[: len(fields)], weights=arrays[len(fields) :]
        )
        found = {key: on_shards(kernel) for key, kernel in kernels.items() if kernel}
        return select(name, implementation, plain, found, *arrays)

    @call.def_vmap
    def call_batched(size, batched, *arrays):
        if any(batched[len(fields) :]):  # one operation per set of weights
            results = jax.vmap(plain, in_axes=[0 if b else None for b in batched])(*arrays)
            return results, (True,) * len(results)
        wide = [_fold(a, b, size) for a, b in zip(arrays[: len(fields)], batched, strict=False)]
        results = run(name, implementation, plain, kernels, tuple(wide), arrays[len(fields) :])
        return tuple(jnp.moveaxis(a, 1, 0) for a in results), (True,) * len(results)

    return call(*fields, *weights)


def select(name: str, implementation: str, plain: Callable, kernels: dict[str, Callable], *arrays: Any) -> Any:
    """Apply the implementation to arrays, or trees of arrays; "auto" is the platform's kernel or else `plain`.

    GPU kernels are for Hopper; a program lowered for CUDA on a machine without a GPU is assumed to target Hopper, or
    what `gpus.lowering_for` describes.

    Raises:
      ValueError: the implementation is neither "auto" nor a key of `kernels`.
    """
    if implementation != "auto":
        if implementation not in kernels:
            raise no_kernel(name, implementation, arrays)
        return kernels[implementation](*arrays)
    known = kernels if hopper() else {key: kernel for key, kernel in kernels.items() if key != "gpu"}
    branches = {platform: known[key] for platform, key in PLATFORMS.items() if key in known}
    return jax.lax.platform_dependent(*arrays, **branches, default=plain) if branches else plain(*arrays)


def stored(x: Any) -> Any:
    """Arrays written to memory once, where XLA on a GPU would compute them again in each fusion that reads them."""
    if AUTO.get() not in ("auto", "gpu"):
        return x
    return jax.lax.platform_dependent(x, cuda=jax.lax.optimization_barrier, default=lambda x: x)


def hopper() -> bool:
    """Whether GPU kernels, which need Hopper, may be chosen: False for another GPU, described or of this machine."""
    described = gpus.described()
    return _machine_has_no_other() if described is None else described.capability == "9.0"


@functools.cache
def _machine_has_no_other() -> bool:
    device = jax.devices()[0]
    return device.platform != "gpu" or getattr(device, "compute_capability", None) == "9.0"


def sized(x: jax.Array) -> bool:
    """Whether a kernel can run on an array: it is not empty, and no size is symbolic, as in `jax.export`."""
    return all(isinstance(n, int) and n > 0 for n in x.shape)


def no_kernel(name: str, implementation: str, arrays: Any, also: str = "") -> ValueError:
    """The error for an implementation without a kernel for these arrays, or trees of arrays; `also` adds details."""
    shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(arrays))
    return ValueError(f"{name}: {implementation=} has no kernel for {shapes}{also}; 'auto' and 'xla' support any.")


def on_rows(kernel: Callable, fields: int) -> Callable:
    """Adapt a kernel whose first `fields` arguments and results are [k, M, c] to arrays [k, *B, N, c]."""

    def call(*arrays):
        rows = arrays[0].shape[1:-1]
        results = kernel(*(a.reshape(len(a), -1, a.shape[-1]) for a in arrays[:fields]), *arrays[fields:])
        return tuple(y.reshape(len(y), *rows, y.shape[-1]) for y in results)

    return call


def _on_shards(kernel, *, plain, fields, weights):
    """The kernel on each device's shard of the batch; `plain` if the ambient mesh does not divide the batch evenly."""
    mesh, batch = jax.sharding.get_abstract_mesh(), fields[0].shape[1:-2]
    if not sized(fields[0]):
        return plain
    # Inside a shard_map with check_vma=True: kernels do not declare the axes over which their results vary.
    if any(jax.typeof(a).manual_axis_type.varying for a in fields):
        return plain
    if mesh.empty or mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types):
        return kernel
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    split = tuple(axis for axis in BATCH_AXES if kinds.get(axis) == AxisType.Auto)
    if AxisType.Explicit in kinds.values() or not split or not batch:
        return plain
    if batch[-1] % math.prod(mesh.shape[axis] for axis in split):
        return plain
    specs = tuple(PartitionSpec(*(None,) * (a.ndim - 3), split) for a in fields)
    # The compiler cannot partition a kernel, so all mesh axes must be manual where it runs.
    return jax.shard_map(
        kernel,
        in_specs=(*specs, *(PartitionSpec() for _ in weights)),
        out_specs=PartitionSpec(*(None,) * len(batch), split),
        axis_names={axis for axis, kind in kinds.items() if kind == AxisType.Auto},
        check_vma=False,
    )


def _fold(array: jax.Array, is_batched: bool, size: int) -> jax.Array:
    """[size, k, *B, N, c] -> [k, size, *B, N, c]; an array without the new axis is broadcast."""
    if is_batched:
        return jnp.moveaxis(array, 0, 1)
    return jnp.broadcast_to(array[:, None], (len(array), size, *array.shape[1:]))
