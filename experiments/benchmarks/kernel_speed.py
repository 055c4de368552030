"""Every octic kernel: its time, the bandwidth and arithmetic it reaches, and plain XLA beside it.

    python -m experiments benchmarks.kernel_speed  # on a GPU or TPU; at most 7 minutes (--minutes)
    python -m experiments benchmarks.kernel_speed --quick --output=/tmp/quick.json  # small, on any machine; a trial

Variants of an operation: "xla", its reference; "eight", where the components are eight separate arrays from the start
and XLA fuses freely; "gpu" or "tpu", its kernel; "auto", the choice of `implementation="auto"` where that is neither.
Bandwidth counts each argument and result once, relative to a copy of 256 MiB timed in the same rounds.  Arithmetic
counts multiply-adds as two operations, elementwise ones by the prices of `equivit/costs.py`, over a matrix product of
8192 x 8192.  Errors are relative to the reference in float32.  A program has four calls, and ten programs are
dispatched in a row, so that a time is the device's and not the host's.  Claims, on a GPU (set for an H200): `d8_gelu`
at 85 % of the copy's bandwidth or better where its field takes 64 MiB or more; kernels within 1e-2 (float32: 2e-3,
products in TF32) of the reference.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from equivit import costs
from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.octic_linear_gelu import octic_linear_gelu
from equivit.kernels.pointwise import gelu, to_isotypic, to_regular
from experiments import findings, flags, machine, timing
from experiments.benchmarks import field_shapes
from experiments.benchmarks.field_shapes import Shape
from experiments.findings import Claim

DEFAULT_SHAPES = ("ViT-H", "ViT-L", "ViT-22B", "ViT-H, class token")
QUICK = Shape("quick", (2,), 8, 16, 64)
SHAPES = {shape.name: shape for shape in field_shapes.REALISTIC + field_shapes.AWKWARD}
TIMES = (4, 10)  # calls in a program, programs in a row
COPY_BYTES, PRODUCT = 256 * 2**20, 8192
BANDWIDTH, LARGE = 0.85, 64 * 2**20
ERRORS = {"bfloat16": 1e-2, "float32": 2e-3}
COLUMNS = dict(operation="", shape="field", type="type", variant="variant", microseconds="us")
COLUMNS |= dict(over_xla="times as fast as xla", bandwidth="of copy bandwidth", arithmetic="of matmul rate")
COLUMNS |= dict(error="error")


def main(arguments=None) -> int:
    options = _options(arguments)
    shapes = [QUICK] if options.quick else [SHAPES[key] for key in options.shape]
    budget, each = timing.Budget(options.minutes), list(itertools.product(options.type, options.operation, shapes))
    entry = findings.Entry(options, dict(runs=options.runs, quick=options.quick), budget)
    entry.keep(("operation", "shape", "type"), [(name, shape.name, dtype) for dtype, name, shape in each])
    product = {dtype: product_rate(dtype, options) for dtype in options.type}
    for dtype, name, shape in each:
        label = f"{name}, {shape.name}, {dtype}"
        if budget.allows(label):
            entry.add(measure(name, shape, dtype, product[dtype], options, budget))
            print(label, flush=True)
    for dtype, rate in product.items():
        print(f"matrix product, {dtype}: {rate / 1e12:.1f} TFLOP/s")
    print(findings.table(entry.rows(), COLUMNS))
    return entry.finish(claims_of(entry.rows(), judged=machine.on_gpu() and not options.quick))


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__)
    options.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated")
    options.add_argument("--operation", action="append", choices=OPERATIONS, help="may be repeated")
    options.add_argument("--type", action="append", choices=ERRORS, help="may be repeated")
    options.add_argument("--quick", action="store_true", help="small shapes, to try the script")
    options = options.parse_args(arguments)
    options.shape = options.shape or list(DEFAULT_SHAPES)
    options.operation, options.type = options.operation or list(OPERATIONS), options.type or ["bfloat16"]
    options.times = (1, 1) if options.quick else TIMES
    return options


def eight_gelu(components: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`d8_gelu` on eight arrays, in the order of `kernels/pointwise.py`."""
    values = to_regular([c.astype(jnp.float32) for c in components])
    return tuple(y.astype(components[0].dtype) for y in to_isotypic([gelu(v) for v in values]))


def eight_linear_gelu(field, weights):
    """`octic_linear_gelu` from the four lines as arrays, and E, to eight arrays."""
    (lines, two), (w_one, w_two, bias) = field, weights
    h = [x @ w for x, w in zip(lines, w_one, strict=True)]
    (e11, e21), (e12, e22) = (jnp.split(row, 2, axis=-1) for row in two @ w_two)
    return eight_gelu((h[0] + bias, *h[1:], e11, e12, e21, e22))


def to_eight(one: jax.Array, two: jax.Array) -> tuple[jax.Array, ...]:
    """The components of a field as arrays of their own."""
    (e11, e21), (e12, e22) = (jnp.split(row, 2, axis=-1) for row in two)
    return (*one, e11, e12, e21, e22)


def plain_gelu(implementation: str) -> Callable:
    return lambda hidden: d8_gelu(*hidden, implementation=implementation)


def plain_linear(implementation: str) -> Callable:
    return lambda x, weights: octic_linear_gelu(*x, *weights, implementation=implementation)


def gradient(function: Callable) -> Callable:
    """The gradient of the field from the result's gradient."""
    return lambda x, gradient: jax.vjp(function, x)[1](gradient)[0]


def with_gradient(function: Callable) -> Callable:
    """The result, and the gradients of the field and the weights from the result's gradient."""

    def both(x, weights, gradient):
        result, pull = jax.vjp(function, x, weights)
        return result, pull(gradient)

    return both


class Operation(NamedTuple):
    """One operation."""

    arguments: str  # a letter for each: x, the field; w, the weights; h, a field of the hidden width
    moved: Callable[[int, int, int], int]  # bytes that have to move, from the bytes of x, w and h
    call: Callable[[str], Callable]  # by implementation, a function of the arguments
    eight: Callable  # the same of arguments of eight arrays
    more: tuple[str, ...] = ()  # implementations to time besides "xla" and the platform's kernel


OPERATIONS = {
    "d8_gelu": Operation("h", lambda x, w, h: 2 * h, plain_gelu, eight_gelu),
    "d8_gelu gradient": Operation(
        "hh", lambda x, w, h: 3 * h, lambda word: gradient(plain_gelu(word)), gradient(eight_gelu)
    ),
    "octic_linear_gelu": Operation("xw", lambda x, w, h: x + w + h, plain_linear, eight_linear_gelu, ("auto",)),
    "octic_linear_gelu and gradient": Operation(
        "xwh",
        lambda x, w, h: 3 * x + 3 * w + 2 * h,  # forward x, w to h; backward x, w, h to x, w
        lambda word: with_gradient(plain_linear(word)),
        with_gradient(eight_linear_gelu),
        ("auto",),
    ),
}
# How an argument becomes eight arrays.
SPLIT = {"h": lambda h: to_eight(*h), "x": lambda x: (tuple(x[0]), x[1]), "w": lambda w: w}


def measure(name: str, shape: Shape, dtype: str, product: float, options, budget) -> list[dict]:
    """A row for each variant, with its shares of a copy's bandwidth and of the rate of a matrix product."""
    operation = OPERATIONS[name]
    sets = [random_arguments(operation, shape, dtype, seed) for seed in range(options.times[0])]
    size = COPY_BYTES // 2 // (2**8 if options.quick else 1)
    copied = [(jax.random.normal(jax.random.key(seed), size, jnp.bfloat16),) for seed in range(len(sets))]
    calls, errors = {"copy": repeated(jnp.negative, copied, options)}, {}
    for variant in variants(operation, sets[0]):
        with budget.trying(f"{name}, {shape.name}, {dtype}, {variant}"):
            if variant == "eight":
                calls[variant] = repeated(operation.eight, [eight_arrays(operation, one) for one in sets], options)
            else:
                calls[variant] = repeated(operation.call(variant), sets, options)
                errors[variant] = error(operation, variant, sets[0])
    seconds = seconds_of(calls, options)
    copy = seconds.pop("copy") * COPY_BYTES / copied[0][0].nbytes
    moved, done = bytes_moved(operation, shape, dtype), operations(operation, shape)
    return [
        dict(
            operation=name,
            shape=shape.name,
            type=dtype,
            variant=variant,
            field_bytes=field_bytes(shape, shape.hidden, dtype),
            microseconds=1e6 * t,
            over_xla=timing.ratio(seconds.get("xla"), t),
            bandwidth=share_of_copy(moved, t, copy),
            arithmetic=done / t / product,
            product_per_second=product,
            gigabytes_per_second=moved / t / 1e9,
            error=errors.get(variant),
        )
        for variant, t in seconds.items()
    ]


def seconds_of(calls: dict[str, Callable], options) -> dict[str, float]:
    """Seconds of one of the calls of `repeated`."""
    milliseconds = timing.milliseconds(calls, options)
    return {name: time / 1e3 / math.prod(options.times) for name, time in milliseconds.items()}


def eight_arrays(operation: Operation, arguments) -> list:
    """The arguments of the variant on eight arrays."""
    return jax.jit(lambda *a: [SPLIT[kind](one) for kind, one in zip(operation.arguments, a, strict=True)])(*arguments)


def random_arguments(operation: Operation, shape: Shape, dtype: str, seed: int) -> list:
    kinds = {"x": shape.field(shape.channels), "w": shape.weights(), "h": shape.field(shape.hidden)}
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def draw(kind, size):
        scale = shape.channels**-0.5 if kind == "w" else 1
        return scale * jax.random.normal(next(keys), size, dtype)

    return [tuple(draw(kind, size) for size in kinds[kind]) for kind in operation.arguments]


def variants(operation: Operation, arguments) -> list[str]:
    """The variants that exist on this machine for these arguments."""
    kernel = {"gpu": ["gpu"], "tpu": ["tpu"]}.get(jax.local_devices()[0].platform, [])
    found = ["xla", "eight"]
    for implementation in [*kernel, *(operation.more if kernel else ())]:
        try:
            jax.eval_shape(operation.call(implementation), *arguments)
        except ValueError:  # no kernel for these shapes
            continue
        found.append(implementation)
    return found


def repeated(function: Callable, sets: list, options) -> Callable:
    """A call that runs the function as often as `options.times` says, on sets of arguments in turn, as caches forget.

    Every result leaves the program and every call waits for the one before: XLA removes, merges and overlaps none.
    """

    def several(*sets):
        results = []
        for arguments in sets:
            if results:
                arguments, results[-1] = jax.lax.optimization_barrier((arguments, results[-1]))
            results.append(function(*arguments))
        return results

    compiled = jax.jit(several).lower(*sets).compile()

    def call():
        for _ in range(options.times[1]):
            results = compiled(*sets)
        return results

    return call


def error(operation: Operation, variant: str, arguments) -> float:
    """The largest deviation of a result from the reference in float32, both as norms over the array."""

    def norms(*arguments):
        exact = operation.call("xla")(*jax.tree.map(lambda a: a.astype(jnp.float32), arguments))
        ours = operation.call(variant)(*arguments)
        ratios = jax.tree.map(lambda a, b: jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()), ours, exact)
        return jnp.stack(jax.tree.leaves(ratios)).max()

    return float(jax.jit(norms)(*arguments))


def product_rate(dtype: str, options) -> float:
    """Operations per second of a matrix product."""
    size = 128 if options.quick else PRODUCT
    keys = jax.random.split(jax.random.key(0), (options.times[0], 2))
    pairs = [tuple(jax.random.normal(key, (size, size), dtype) for key in pair) for pair in keys]
    return 2 * size**3 / seconds_of({"product": repeated(jnp.matmul, pairs, options)}, options)["product"]


def share_of_copy(moved: int, seconds: float, copy_seconds: float) -> float:
    """Bandwidth over a copy's, which reads and writes COPY_BYTES each."""
    return (moved / seconds) / (2 * COPY_BYTES / copy_seconds)


def field_bytes(shape: Shape, channels: int, dtype: str) -> int:
    return sum(map(math.prod, shape.field(channels))) * jnp.dtype(dtype).itemsize


def bytes_moved(operation: Operation, shape: Shape, dtype: str) -> int:
    """Bytes of each argument and result of a forward or a backward pass, once."""
    weights = sum(map(math.prod, shape.weights())) * jnp.dtype(dtype).itemsize
    return operation.moved(field_bytes(shape, shape.channels, dtype), weights, field_bytes(shape, shape.hidden, dtype))


def operations(operation: Operation, shape: Shape) -> int:
    """Floating-point operations: two for a multiply-add, Fourier transforms as fast ones."""
    arguments = jax.eval_shape(functools.partial(random_arguments, operation, shape, "float32", 0))

    def scoped(*arguments):
        with jax.named_scope("activation"):  # the operation itself marks only its linear map
            return operation.call("xla")(*arguments)

    counted = costs.count(scoped, *arguments)
    return sum(2 * cost.macs * (kind != "activation") + cost.operations for kind, cost in counted.kinds.items())


def claims_of(rows: list[dict], *, judged: bool) -> list[Claim]:
    claims = []
    for row in rows:
        label = f"{row['operation']}, {row['shape']}, {row['type']}, {row['variant']}"
        if row["variant"] in ("gpu", "tpu", "auto"):
            claims.append(Claim(f"{label}: error", row["error"], at_most=ERRORS[row["type"]], judged=judged))
        if row["operation"] == "d8_gelu" and row["variant"] in ("gpu", "tpu") and row["field_bytes"] >= LARGE:
            claims.append(Claim(f"{label}: of copy bandwidth", row["bandwidth"], at_least=BANDWIDTH, judged=judged))
    return claims
