"""Count the cost of a function from its jaxpr, without running, compiling or allocating anything.

A primitive belongs to the innermost of the named scopes "linear", "attention", "depthwise", "activation" and "norm"
that the layers open, and to "other" outside all of them.  The body of a scan counts once per iteration.

Papers count differently; each figure is a named sum of these counts: `Costs.fvcore` for octic ViTs, Tables 2 and 3
("FLOPs", which are multiply-adds), `Costs.linear_and_norms` for Jumbo, and `Costs.double_macs` for "Accelerating Vision
Transformers with Drop-in Depthwise Convolution", Tables 1 and A.3.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

KINDS: tuple[str, ...] = ("linear", "attention", "depthwise", "activation", "norm", "other")

# Costs of primitives, as in the paper's counter: a square root costs 4, a softmax 5 (one per step), and a GELU 8 (erf
# at 4, three products and a sign).
_CHEAP = (
    "abs add add_any atan2 ceil clamp cos cosh div exp exp2 expm1 floor integer_pow log log1p max min mul neg rem "
    "round sign sin sinh square sub tan tanh"
)
_DEAR = "cbrt erf erf_inv erfc logistic rsqrt sqrt"
_REDUCTIONS = "cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod reduce_sum"
# Data movement, selection, indexing, communication and random bits; jaxprs inside them are not counted.
_FREE = (
    "addupdate all_gather all_to_all axis_index bitcast_convert_type broadcast_in_dim concatenate "
    "convert_element_type copy copy_p debug_callback device_put dynamic_slice dynamic_update_slice empty empty2 "
    "gather get iota layout_constraint masked_load masked_swap mesh_cast name optimization_barrier pad "
    "ppermute psum psum_invariant pvary random_bits random_fold_in random_seed random_split random_unwrap random_wrap "
    "reduce_precision reduce_scatter reshape reshard rev scatter scatter-add select_n sharding_constraint slice sort "
    "split squeeze stack stop_gradient swap threefry2x32 tie transpose unstack"
)
# Operations per element of the result.
ELEMENTWISE = dict.fromkeys(_CHEAP.split(), 1) | dict.fromkeys(_DEAR.split(), 4) | {"pow": 5}
REDUCTIONS = frozenset(_REDUCTIONS.split())  # one operation per element of the argument
FREE = frozenset(_FREE.split())
_MULTIPLY_ADD = ("mul", "add", "add_any", "reduce_sum")  # in a depthwise convolution
# Loops whose number of iterations is not in the jaxpr.
UNKNOWN_TIMES = {"while": "while loop", "core_map": "core_map kernel"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs of one kind."""

    # Multiply-adds of matrix products and convolutions, as written.  A depthwise convolution counts the same if written
    # as sums of products.
    macs: int = 0
    # All other arithmetic, by the costs above.  A matrix product inside the activation is a Fourier transform of the
    # group; besides its `macs` it adds the additions of a fast transform, log2(n) per value.
    operations: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.macs + other.macs, self.operations + other.operations)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.macs * times, self.operations * times)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs by kind, and notes about uncertain counts."""

    kinds: dict[str, Cost]  # a `Cost` for each of KINDS
    notes: tuple[str, ...] = ()  # one sentence for each uncertainty, empty if the count is exact

    def __getitem__(self, kind: str) -> Cost:
        return self.kinds[kind]

    @property
    def macs(self) -> int:
        """Multiply-adds of all matrix products and convolutions, as written."""
        return sum(cost.macs for cost in self.kinds.values())

    @property
    def double_macs(self) -> int:
        """The count in papers on depthwise replacements: two per multiply-add, and nothing else."""
        return 2 * self.macs

    @property
    def fvcore(self) -> int:
        """The count of octic ViTs: fvcore with costs for elementwise operations, and attention as one fused operation.

        It counts the multiply-adds of linear maps and convolutions, without biases; the two products of attention,
        without the softmax; the activation with fast Fourier transforms; and everything else in full.
        """
        k = self.kinds
        products = k["linear"].macs + k["attention"].macs + k["depthwise"].macs + k["other"].macs
        return products + k["activation"].operations + k["norm"].operations + k["other"].operations

    @property
    def fvcore_unfused(self) -> int:
        """The count of "Flopping for FLOPs": the same with the scaling and the softmax inside attention."""
        return self.fvcore + self.kinds["attention"].operations

    @property
    def linear_and_norms(self) -> int:
        """The count of Jumbo, Tables 1, 4 and 5: linear maps and norms, without the products of attention."""
        return self.kinds["linear"].macs + self.kinds["norm"].operations


def count(function: Callable, *arguments) -> Costs:
    """Count one call of `function`; arguments may be arrays or abstract (`jax.ShapeDtypeStruct`)."""
    return count_jaxpr(jax.make_jaxpr(function)(*arguments))


def count_jaxpr(jaxpr: ClosedJaxpr) -> Costs:
    """Count one evaluation of a jaxpr.

    Nested functions, rematerialised parts and kernels are included; a `shard_map` counts for all its devices.  A `cond`
    counts as its most expensive branch, a platform-dependent branch as its default.  The body of a `while` loop counts
    once, with a note, since the number of iterations is unknown.
    """
    costs = _walk(jaxpr.jaxpr, "other")
    return Costs(costs.kinds, tuple(sorted(set(costs.notes))))


def _walk(jaxpr: Jaxpr, kind: str) -> Costs:
    return _total(_equation(eqn, _scope(eqn) or kind) for eqn in jaxpr.eqns)


def _equation(eqn: JaxprEqn, kind: str) -> Costs:
    """Costs of one equation in the scope `kind`."""
    name = eqn.primitive.name
    if name == "cond":
        return _cond(eqn, kind)
    if name in FREE:
        return Costs({})
    if name == "dot_general":
        return Costs({kind: _dot(eqn, kind)})
    if name == "bilinear_product":  # `kernels.product`
        return Costs({kind: _bilinear(eqn)})
    if name == "conv_general_dilated":
        return Costs({kind: _convolution(eqn)})
    if inner := list(jaxprs_in_params(eqn.params)):
        return _nested(eqn, [sub.jaxpr if isinstance(sub, ClosedJaxpr) else sub for sub in inner], kind)
    if not _is_floating(eqn.outvars):  # index arithmetic, comparisons, random bits
        return Costs({})
    if kind == "depthwise" and name in _MULTIPLY_ADD:
        return Costs({kind: Cost(macs=_size(eqn.outvars[0]) if name == "mul" else 0)})
    if name in ELEMENTWISE:
        return Costs({kind: Cost(operations=ELEMENTWISE[name] * _size(eqn.outvars[0]))})
    if name in REDUCTIONS:
        return Costs({kind: Cost(operations=_size(eqn.invars[0]))})
    return Costs({}, (f"the primitive {name} is not counted",))


def _nested(eqn, inner: list[Jaxpr], kind) -> Costs:
    name, body = eqn.primitive.name, _total(_walk(sub, kind) for sub in inner)
    times = _repetitions(eqn)
    notes = (f"the body of a {UNKNOWN_TIMES[name]} is counted once",) if name in UNKNOWN_TIMES else ()
    return Costs({k: cost * times for k, cost in body.kinds.items()}, (*body.notes, *notes))


def _cond(eqn, kind) -> Costs:
    branches = [_walk(branch.jaxpr, kind) for branch in eqn.params["branches"]]
    platforms = eqn.params.get("branches_platforms")
    if platforms and platforms[-1] is None:  # lax.platform_dependent; its default is the plain computation
        return branches[-1]
    return max(branches, key=lambda costs: sum(cost.macs + cost.operations for cost in costs.kinds.values()))


def _repetitions(eqn) -> int:
    """The number of times that an equation evaluates its inner jaxprs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _dot(eqn, kind) -> Cost:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    n, size = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted), _size(eqn.outvars[0])
    transform = round(size * math.log2(n)) if kind == "activation" and n else 0
    return Cost(size * n, transform)


def _bilinear(eqn) -> Cost:
    axes = "".join(eqn.params["axes"].split("->")[0].split(","))
    lengths = [length for factor in eqn.invars for length in factor.aval.shape]
    return Cost(math.prod(dict(zip(axes, lengths, strict=True)).values()))


def _convolution(eqn) -> Cost:
    """Count every tap of every output, with padding but without the zeros of a dilated input."""
    kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    taps = math.prod(kernel.shape) // kernel.shape[numbers.rhs_spec[0]]
    return Cost(_size(eqn.outvars[0]) * taps // math.prod(eqn.params["lhs_dilation"]))


def _scope(eqn) -> str | None:
    """The innermost named scope that is a kind.  Transformations wrap names: "jvp(linear)"."""
    stack = str(eqn.source_info.name_stack)
    found = [word for part in stack.split("/") for word in part.replace(")", "").split("(") if word in KINDS]
    return found[-1] if found else None


def _size(variable) -> int:
    return math.prod(variable.aval.shape)


def _is_floating(variables) -> bool:
    """Whether any of the variables is an array of real or complex numbers."""
    dtypes = [getattr(v.aval, "dtype", None) for v in variables]
    return any(d is not None and jax.numpy.issubdtype(d, np.inexact) for d in dtypes)


def _total(parts: Iterable[Costs]) -> Costs:
    kinds, notes = dict.fromkeys(KINDS, Cost()), []
    for part in parts:
        notes.extend(part.notes)
        for kind, cost in part.kinds.items():
            kinds[kind] = kinds[kind] + cost
    return Costs(kinds, tuple(notes))
