"""The bytes that a kernel moves and the operations of its products, from the text of a program."""

import math
import re
from typing import NamedTuple

from equivit.targets.program import Array, Computation, Instruction, Program

# Instructions that launch nothing.
_FREE = (
    "parameter constant tuple get-tuple-element bitcast iota after-all add-dependency partition-id replica-id "
    "optimization-barrier opt-barrier copy-done async-update async-done fusion-update fusion-done"
)
FREE = frozenset(_FREE.split())
SECTOR = 32  # bytes that a GPU reads at least
# Instructions of which any part of the result may need all of their operands.
_WHOLE = frozenset(("call", "convolution", "custom-call", "dot", "fusion", "reduce-window", "scatter", "sort"))


class Kernel(NamedTuple):
    """One kernel."""

    label: str  # opcode, and the target of a custom call
    bytes: int  # read and written
    operations: int = 0  # of matrix products and convolutions, two for each multiply-add
    dtype: str = "bf16"  # of the factors
    counted: bool = True  # False for a custom call whose operations are unknown


def kernel(program: Program, computation: Computation, instruction: Instruction) -> Kernel:
    """Account for an instruction that launches a kernel."""
    body = program.computations.get(instruction.called("calls") or "")
    if body is not None:
        operations, dtype = _products(program, body)
        return Kernel("fusion", _moved_by_fusion(computation, instruction, body), operations, dtype)
    operands = [computation[name] for name in instruction.operands if name in computation]
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, operands)
    operations, dtype = _dot(instruction, operands) if instruction.opcode == "dot" else (0, "bf16")
    return Kernel(instruction.opcode, _moved(instruction, operands), operations, dtype)


def _moved(instruction: Instruction, operands: list[Instruction]) -> int:
    """Bytes read and written outside of a fusion."""
    if instruction.opcode in ("dynamic-slice", "slice", "gather", "copy-start"):
        return 2 * instruction.result[0].bytes
    if instruction.opcode == "dynamic-update-slice":  # in place
        return 2 * operands[1].bytes
    return instruction.bytes + sum(operand.bytes for operand in operands)


def _moved_by_fusion(computation, instruction, body) -> int:
    """Bytes read and written by a fusion: of each operand what the results need, of an array changed in place a row."""
    parameters = {int(i.arguments): i.name for i in body.values() if i.opcode == "parameter"}
    needed, read = _needed(body), 0
    for number, name in enumerate(instruction.operands):
        whole = computation[name].bytes if name in computation else 0
        read += round(whole * needed[parameters[number]]) if number in parameters else whole
    updates = [i for i in body.values() if i.opcode == "dynamic-update-slice"]
    saved = sum(i.bytes - body[i.operands[1]].bytes for i in updates)
    *_, root = body.values()  # whose bytes are the fusion's; a `fusion-start` returns its operands too
    return read + max(root.bytes - saved, 0)


def _needed(body: Computation) -> dict[str, float]:
    """The share of each value in a fused computation that the results need, at most 1."""
    used = {name for user in body.values() for name in user.operands}
    needed = {name: float(name not in used and user.opcode != "parameter") for name, user in body.items()}
    for user in reversed(body.values()):
        for place, name in enumerate(user.operands):
            if name in body and needed[user.name]:
                needed[name] = min(1.0, needed[name] + needed[user.name] * _needed_by(user, place, body[name]))
    return needed


def _needed_by(user: Instruction, place: int, operand: Instruction) -> float:
    """The share of an operand that the whole result of an instruction needs; above 1 if entries are repeated."""
    if user.opcode in ("dynamic-slice", "gather", "slice") and place == 0:
        return _fetched(user, operand.result[0])
    if user.opcode == "dynamic-update-slice" and place == 0:
        return 0.0  # in place
    if user.opcode in ("reduce", "tuple", "get-tuple-element"):
        return 1.0
    if user.opcode in _WHOLE or not operand.result:
        return math.inf  # of a part of the result too
    return math.prod(user.result[0].shape) / max(math.prod(operand.result[0].shape), 1)


def _fetched(cut: Instruction, source: Array) -> float:
    """The share of an array that a cut of it reads, in whole sectors of memory."""
    sizes = _integers(r"slice_sizes=\{([\d,]*)\}", cut.attributes) or cut.result[0].shape
    steps = [int(step or 1) for step in re.findall(r"\[\d+:\d+(?::(\d+))?\]", cut.attributes)] or [1] * len(sizes)
    piece = 1  # entries that lie side by side
    for size, step, full in zip(sizes[::-1], steps[::-1], source.shape[::-1], strict=False):
        if step > 1:
            break
        piece *= size
        if size < full:
            break
    width = source.bytes // max(math.prod(source.shape), 1)
    sectors = math.prod(cut.result[0].shape) // max(piece, 1) * -(-piece * width // SECTOR)
    return sectors * SECTOR / max(source.bytes, 1)


def _products(program: Program, body: Computation) -> tuple[int, str]:
    """Operations of the products in a fused computation, and the type of their factors."""
    total, dtype = 0, "bf16"
    for instruction in body.values():
        operands = [body[name] for name in instruction.operands if name in body]
        inner = program.computations.get(instruction.called("calls") or "")
        found = (0, dtype)
        if instruction.opcode == "dot":
            found = _dot(instruction, operands)
        elif inner is not None:
            found = _products(program, inner)
        total, dtype = total + found[0], found[1] if found[0] else dtype
    return total, dtype


def _dot(instruction: Instruction, operands: list[Instruction]) -> tuple[int, str]:
    axes = _integers(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    factor = operands[0].result[0]
    return _product(factor, axes, instruction.result[0]), _rate(factor)


def _custom_call(instruction: Instruction, operands: list[Instruction]) -> Kernel:
    """A library's kernel, or one of our own, whose operations the text does not hold."""
    target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
    label, moved = target[1] if target else "custom-call", _moved(instruction, operands)
    factor = operands[0].result[0] if operands and operands[0].result else Array("bf16", ())
    if label.startswith("__cublas"):
        moved = sum(o.bytes for o in operands) + instruction.result[0].bytes  # without the workspace
        axes = _integers(r'"lhs_contracting_dimensions":\["?([\d,"]*?)"?\]', instruction.attributes)
        return Kernel(label, moved, _product(factor, axes, instruction.result[0]), _rate(factor))
    if label.startswith("__cudnn$fmha"):
        sizes = _integers(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]', instruction.attributes)
        products = 5 if "Backward" in label else 2
        return Kernel(label, moved, 2 * products * math.prod(sizes) * factor.shape[-1], _rate(factor))
    if label.startswith("__cudnn$conv"):
        return Kernel(label, moved, _convolution(label, instruction, operands), _rate(factor))
    return Kernel(label, moved, counted=not label.startswith("mosaic_gpu"))


def _product(factor: Array, axes: tuple[int, ...], result: Array) -> int:
    return 2 * math.prod(result.shape) * math.prod(factor.shape[axis] for axis in axes)


def _convolution(label, instruction, operands) -> int:
    """Operations of a convolution or one of its gradients: every tap of every result of the convolution."""
    axes = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    first, second, result = operands[0].result[0], operands[1].result[0], instruction.result[0]
    taken = {"BackwardInput": (first, second), "BackwardFilter": (second, result)}
    outputs, taps = next((pair for kind, pair in taken.items() if kind in label), (result, second))
    channels = taps.shape[axes[1].index("o")] if axes else 1
    return 2 * math.prod(outputs.shape) * math.prod(taps.shape) // channels


def _rate(factor: Array) -> str:
    return "bf16" if factor.dtype in ("bf16", "f16") else "f32"


def _integers(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()
