"""The cost of a training step on cards that are not present, and from it the hours of a run."""

from typing import Any

import jax

from equivit.targets.accounting import Account, account
from equivit.targets.cards import Target
from equivit.targets.collectives import KINDS

# Measured time over the floor on an H200: gradients of ViT-H/14 blocks, plain and D8, of 64
# images in mixed precision, unrolled (4.84 and 2.70 ms).  A D8 forward pass: 1.92.
MEASURED = (1.44, 1.79)


def estimate(compiled: jax.stages.Compiled, target: Target, steps: int | None) -> dict[str, Any]:
    """Account for a compiled training step: numbers for one card and one step.

    Returns {"card", "cards", "rates", "memory" (bytes: "arguments", "temporaries", "peak", "card"), "kernels", "bytes",
    "floor_ms", "collectives" ({kind: {"number", "overlapping", "bytes", "ms"}}), "link_ms", "exposed_ms", "step_ms"
    (least and most), "steps", "hours" (least and most; None without steps), "notes"}.

    Args:
      steps: of the whole run; None if unknown.
    """
    found, held = account(compiled.as_text() or "", target), memory(compiled)
    # Collectives that no kernel covers are added to the floor at the nominal bandwidth of the links.
    step = [1e3 * (ratio * found.floor + found.exposed) for ratio in MEASURED]
    return {
        "card": target.card.name,
        "cards": target.count,
        "rates": target.card.rates,
        "memory": {key: held[key] for key in ("arguments", "temporaries", "peak")} | {"card": target.card.memory},
        "kernels": found.launches,
        "bytes": found.bytes,
        "floor_ms": 1e3 * found.floor,
        "collectives": _collectives(found),
        "link_ms": sum(1e3 * t.times * t.collective.seconds for t in found.transfers),
        "exposed_ms": 1e3 * found.exposed,
        "step_ms": step,
        "steps": steps,
        "hours": None if steps is None else [steps * ms / 3.6e6 for ms in step],
        "notes": sorted(found.notes),
    }


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a program on each device: "arguments", "outputs", "temporaries" and "peak".

    Outputs that reuse donated arguments count once in the peak.  Raises ValueError if the compiler reports no memory.
    """
    stats: Any = compiled.memory_analysis()
    if stats is None:
        raise ValueError("memory: this platform's compiler does not report the memory of a program.")
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "peak": held + stats.temp_size_in_bytes,
    }


def _collectives(found: Account) -> dict[str, dict[str, Any]]:
    """Number, number with kernels between start and end, bytes that a card sends, and milliseconds, by kind."""
    result = {}
    for kind in KINDS:
        transfers = [t for t in found.transfers if t.collective.kind == kind]
        if transfers:
            result[kind] = {
                "number": sum(t.times for t in transfers),
                "overlapping": sum(t.times for t in transfers if t.overlaps),
                "bytes": sum(t.times * t.collective.bytes for t in transfers),
                "ms": sum(1e3 * t.times * t.collective.seconds for t in transfers),
            }
    return result
