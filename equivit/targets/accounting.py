"""The account of a compiled program: kernels, bytes, collectives, and a floor of its time."""

import dataclasses
import re
from collections.abc import Iterator

from equivit.targets import collectives, kernels
from equivit.targets.cards import Target
from equivit.targets.collectives import Collective
from equivit.targets.kernels import Kernel
from equivit.targets.program import Computation, Instruction, Program, parse


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective in its program."""

    collective: Collective
    times: int  # that it runs
    exposed: float  # seconds of it that no kernel between its start and its end covers
    overlaps: bool  # whether there is such a kernel


@dataclasses.dataclass
class Account:
    """Kernels and collectives of a program, each as often as it runs."""

    target: Target
    kernels: list[tuple[Kernel, int]] = dataclasses.field(default_factory=list)  # and how often each runs
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    notes: set[str] = dataclasses.field(default_factory=set)

    @property
    def launches(self) -> int:
        """The number of kernels."""
        return sum(times for _, times in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that the kernels read and write."""
        return sum(kernel.bytes * times for kernel, times in self.kernels)

    @property
    def floor(self) -> float:
        """Seconds of the kernels, each at the larger of its bytes and its products at the rates of the card."""
        return sum(self.seconds(kernel) * times for kernel, times in self.kernels)

    @property
    def exposed(self) -> float:
        """Seconds of collectives that no kernel covers."""
        return sum(transfer.exposed * transfer.times for transfer in self.transfers)

    def seconds(self, kernel: Kernel) -> float:
        """The least time of a kernel."""
        card = self.target.card
        return max(kernel.bytes / card.bandwidth, kernel.operations / card.products[kernel.dtype])


def account(text: str, target: Target) -> Account:
    """Account for the text of a program that was compiled for a target.

    The body of a loop counts once per iteration; a conditional counts as its cheapest branch.
    """
    result = Account(target)
    program = parse(text)
    _visit(program, program.computations[program.entry], 1, result)
    if any(not kernel.counted for kernel, _ in result.kernels):
        result.notes.add("the operations of Pallas kernels are not in the floor, only their bytes")
    return result


def _visit(program: Program, computation: Computation, times: int, result: Account) -> None:
    """Add the instructions of a computation that runs `times` times."""
    under_way: dict[str, tuple[Collective, float]] = {}  # and the seconds of it that are not covered
    for instruction in computation.values():
        if instruction.opcode in kernels.FREE:
            continue
        if collectives.kind(instruction):
            found = collectives.collective(computation, instruction, result.target)
            if instruction.opcode.endswith("-start"):
                under_way[instruction.name] = found, found.seconds
            else:
                result.transfers.append(Transfer(found, times, found.seconds, False))
        elif collectives.ends(instruction):
            found, left = under_way.pop(instruction.operands[0])
            result.transfers.append(Transfer(found, times, left, left < found.seconds))
        elif (inner := _inner(program, instruction, result)) is not None:
            _add(result, inner, times)
            _cover(under_way, inner.floor)
        else:
            kernel = kernels.kernel(program, computation, instruction)
            result.kernels.append((kernel, times))
            _cover(under_way, result.seconds(kernel))


def _cover(under_way: dict[str, tuple[Collective, float]], seconds: float) -> None:
    """Cover the collectives that are under way, the oldest first: they share the links."""
    for name, (found, left) in under_way.items():
        covered = min(left, seconds)
        under_way[name], seconds = (found, left - covered), seconds - covered


def _inner(program: Program, instruction: Instruction, result: Account) -> Account | None:
    """The account of what a loop, a call or a conditional runs; None for a kernel."""
    match instruction.opcode:
        case "while":
            trip = re.search(r"known_trip_count[^\d]*(\d+)", instruction.attributes)
            if not trip:
                result.notes.add("loops of unknown length are counted once")
            return _account_of(program, instruction.called("body"), int(trip[1]) if trip else 1, result.target)
        case "call" | "async-start":
            return _account_of(program, instruction.called("to_apply", "calls"), 1, result.target)
        case "conditional":
            branches = (_account_of(program, name, 1, result.target) for name in _branches(instruction))
            result.notes.add("a conditional counts as its cheapest branch")
            return min(branches, key=lambda branch: branch.floor)
    return None


def _account_of(program: Program, name: str | None, times: int, target: Target) -> Account:
    found = Account(target)
    _visit(program, program.computations[name or ""], times, found)
    return found


def _add(result: Account, inner: Account, times: int) -> None:
    result.kernels += [(kernel, n * times) for kernel, n in inner.kernels]
    result.transfers += [dataclasses.replace(t, times=t.times * times) for t in inner.transfers]
    result.notes |= inner.notes


def _branches(instruction: Instruction) -> Iterator[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    yield from re.findall(r"%([\w.\-]+)", listed[1] if listed else "")
    yield from re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", instruction.attributes)
