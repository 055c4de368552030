"""Blocks beside PyTorch, kernels, adaptive models and training steps on a GPU, most important first.

    python -m experiments benchmarks.gpu --minutes=10 --peer=torch-venv/bin/python  # resumes the last run
    python -m experiments benchmarks.gpu --only="swin_t," --only=kernels  # cells whose names have one of these words
    python -m experiments benchmarks.gpu --dry  # on any machine: lists the cells, and what each card has measured
    python -m experiments benchmarks.gpu --quick --output=/tmp/gpu.json  # tiny sizes on any machine; tries the script

The JSON has an entry for each card, in which every cell has its machine, versions, commit and settings; it is written
after each cell.  A cell that is there with the same settings is not measured again: another --output begins from the
start.  Cells of --quick have an entry of their own.  The peer is a Python with torch, and timm for timm's blocks;
--official is a clone of github.com/davnords/octic-vits, for its octic blocks.  Times are medians.  A block's time is an
eighth of the time of a stack of 8 blocks; "kernels", from a trace, are of the whole stack.  No claims.
"""

import json
from typing import Any

import jax

from equivit import files
from experiments import findings, flags, machine, timing
from experiments.benchmarks import gpu_cells


def main(arguments=None) -> int:
    options = _options(arguments)
    cells = chosen(gpu_cells.cells(options), options.only)
    entries = findings.read_json(options.output)
    if options.dry:
        print(findings.table(states(cells, entries), {"cell": "cell", **{card: card for card in entries}}))
        return 0
    if not (machine.on_gpu() or options.quick):
        raise ValueError("benchmarks.gpu needs a GPU, and this machine has none; --dry lists what it would measure.")
    return measure(cells, entries, options)


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__, runs=20, warmup=3, minutes=10)
    options.add_argument("--peer", help="a Python with torch; without it no peer is timed")
    options.add_argument("--official", help="a directory of the official octic ViTs, for the peer")
    options.add_argument("--only", action="append", default=[], help="words in the name of a cell; may be repeated")
    options.add_argument("--dry", action="store_true", help="list the cells and measure nothing")
    options.add_argument("--quick", action="store_true", help="tiny sizes on any machine, to try the script")
    options.set_defaults(entry=None)
    return options.parse_args(arguments)


def chosen(cells: list[gpu_cells.Cell], words: list[str]) -> list[gpu_cells.Cell]:
    """The cells whose names have one of the words; all without words."""
    found = [cell for cell in cells if not words or any(word in cell.name for word in words)]
    if not found:
        raise ValueError(f"--only={', '.join(words)}: no cell has these words in its name; --dry lists the cells.")
    return found


def measure(cells: list[gpu_cells.Cell], entries: dict[str, dict], options) -> int:
    """Measure what the card has not yet, until the time is over; returns 1 if a cell failed."""
    card = options.entry or jax.local_devices()[0].device_kind + (", quick" if options.quick else "")
    known, budget = entries.setdefault(card, {}), timing.Budget(options.minutes)
    settings = dict(runs=options.runs, warmup=options.warmup, quick=options.quick)
    for cell in cells:
        # Cells from before settings were stored count as measured.
        measured = cell.name in known and known[cell.name].get("settings", settings) == settings
        if measured or not budget.allows(cell.name):
            continue
        with budget.trying(cell.name):
            known[cell.name] = {**cell.measure(options), "settings": settings, **findings.facts()}
            files.write_text(options.output, json.dumps(entries, indent=1) + "\n")
            print(f"{cell.name}: {state(known[cell.name])}", flush=True)
        jax.clear_caches()
    print(f"{card}: {sum(cell.name in known for cell in cells)} of {len(cells)} cells are measured: {options.output}")
    for name, error in budget.failed.items():
        print(f"failed: {name}: {error.splitlines()[0]}")
    return int(bool(budget.failed))


def states(cells: list[gpu_cells.Cell], entries: dict[str, dict]) -> list[dict[str, Any]]:
    """A row for each cell: its name, and what each card measured."""
    rows = []
    for cell in cells:
        found = {card: state(known[cell.name]) for card, known in entries.items() if cell.name in known}
        rows.append({"cell": cell.name, **found})
    return rows


def state(found: dict[str, Any]) -> str:
    """A measurement in a few words."""
    return f"{found['milliseconds']:.3g} ms" if "milliseconds" in found else f"{len(found['rows'])} rows"
