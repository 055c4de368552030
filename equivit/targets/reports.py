"""The words and tables of an estimate."""

from collections.abc import Iterator
from typing import Any

from equivit.targets.estimates import MEASURED

SHARE = 0.75  # of a card's memory, as JAX takes by default
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows


def report(found: dict[str, Any], mesh: dict[str, int], batch_size: int) -> Iterator[str | Table]:
    """Lines and tables for `estimate`, in the order of printing."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    yield f"{found['cards']} x {found['card']}, mesh {axes}: a training step of {batch_size:,} images, on each card"
    memory = found["memory"]
    yield ("GiB of memory", *memory), [("", *(f"{size / 2**30:.2f}" for size in memory.values()))]
    if memory["peak"] > SHARE * memory["card"]:
        yield (
            f"this does not fit: JAX takes {SHARE:.0%} of a card (XLA_PYTHON_CLIENT_MEM_FRACTION changes that); "
            "raise optimizer.accumulation, or set model.remat=dots"
        )
    floor = f"{found['kernels']:,}", f"{found['bytes'] / 1e9:,.1f}", f"{found['floor_ms']:,.1f}"
    yield ("kernels", "number", "GB moved", "floor, ms"), [("", *floor)]
    if found["collectives"]:
        yield ("collectives", "number", "beside kernels", "GB sent", "ms of links"), _rows(found["collectives"])
        links, exposed = found["link_ms"], found["exposed_ms"]
        yield f"links: {links:.1f} ms at their nominal rates, {exposed:.1f} ms of it beside no kernel"
    yield from _times(found)
    for note in found["notes"]:
        yield f"note: {note}."


def _rows(collectives: dict[str, dict]) -> list[tuple[str, ...]]:
    return [
        (kind, f"{c['number']:,}", f"{c['overlapping']:,}", f"{c['bytes'] / 1e9:,.3f}", f"{c['ms']:,.2f}")
        for kind, c in collectives.items()
    ]


def _times(found: dict[str, Any]) -> Iterator[str]:
    """The estimates, and what they rest on."""
    step, ratio = _range(found["step_ms"]), f"{MEASURED[0]} to {MEASURED[1]}"
    yield f"estimate of a step: {step} ms, {ratio} times the floor, as gradients of ViT-H blocks on an H200, plus links"
    if found["hours"]:
        hours = _range(found["hours"])
        yield f"estimate of the run: {hours} hours for {found['steps']:,} steps, without data and evaluation"
    yield f"the floor: the larger of bytes and products over the card's rates ({found['rates']})"


def _range(values: list[float]) -> str:
    least, most = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in values)
    return f"{least} to {most}"
