"""Accuracy of Jumbo, registers and the compute-efficient baselines on ImageNet-1k: Tables 6 to 12.

    python -m experiments tables.jumbo.accuracy runs/jumbo --missing --tables=9  # some seconds
    python -m experiments tables.jumbo.accuracy runs/jumbo --evaluate --set=hr=folder:/data/imagenet-hr

Takes the runs of configs/jumbo_in1k.py in the directory, at any depth; means over seeds.  Cells are ours, in brackets
the paper's; --missing prints the commands for rows without a run.

The paper trains everything at 128 px with learning rates 3e-3 and 1e-3 and reports the better one, by top-1 on the
validation set; so does the last table here.  A run at 224 px counts for the rate of the run in its `config.init`, which
must still exist.  Rows of Tables 6 and 12, whose rate the paper does not give, show the better one.

A run ends with ImageNet's validation set.  --evaluate evaluates the other test sets (ReaL, v2, R, HR) where that has
not been done, on the sources of `test_sets.py` or of --set=NAME=SOURCE[,SPLIT]; cells of a set that cannot be opened
stay empty.  "R, 200" is among the classes of ImageNet-R alone, not in the paper.

Claims, for runs of the recipe: top-1 is at most 0.3 points below the paper's (single runs, rounded to 0.1; not Table
12, whose J = 6 and multiplier 4 is up to a point below Table 8).  Jumbo is above 16 registers of the same width, by
more the narrower the model (at 224 px 13.0, 3.9 and 0.8 points at widths 128, 192 and 384).
"""

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from equivit.configs import jumbo_in1k
from equivit.training import config as configs
from experiments import findings
from experiments.findings import Claim
from experiments.tables import finished_runs
from experiments.tables.finished_runs import Run
from experiments.tables.jumbo import paper_numbers, test_sets
from experiments.tables.jumbo.paper_numbers import FIGURES, RATES, SETS

NAMES = {"val": "Val", "real": "ReaL", "v2": "v2", "r": "R", "hr": "HR"}
COLUMNS = dict(label="", rate="rate", better="better", seeds="seeds")
COLUMNS |= {f"{name}_{top}": f"{NAMES[name]} top-{top}" for name in SETS for top in (1, 5)}
COLUMNS |= {"r_present_1": "R, 200"}
BEST = dict(label="", pixels="px", rate="rate", top1="Val top-1", paper="paper", gap="difference")
WITHIN = 0.3  # points
SIZES = ("nano", "tiny", "small")  # that Jumbo and Registers share, narrowest first
FREE = ("init", "objective.teacher")


class Cell(NamedTuple):
    """One training.

    Attributes:
      words: of the mode of configs/jumbo_in1k.py, such as "tiny,registers".
      pixels: 128, or 224 for the second stage.
      rate: of the stage at 128 px, of RATES, also for runs that begin with it; "": unknown.
    """

    words: str
    pixels: int
    rate: str


Found = Mapping[Cell, list[Run]]


def main(arguments=None) -> int:
    parser = finished_runs.parser(__doc__, __file__, tables=paper_numbers.TITLES)
    parser.add_argument("--evaluate", action="store_true", help="ReaL, v2, R and HR, where not done")
    several = dict(type=test_sets.parse_place, action="append", default=[])
    parser.add_argument("--set", **several, help="NAME=SOURCE[,SPLIT], several times")
    options = parser.parse_args(arguments)
    entries = [entry for entry in paper_numbers.ROWS if entry["table"] in options.tables]
    runs = finished_runs.read(options.runs, may_be_empty=options.missing)
    wanted = list(dict.fromkeys(cell for entry in entries for cell in cells_of(entry)))
    found, why = finished_runs.present(runs, cell_of, wanted, free=FREE), {}
    if options.evaluate:
        for run in (run for group in found.values() for run in group):
            why |= test_sets.evaluate(run.place, test_sets.PLACES | dict(options.set))
    first = {cell: group[0] for cell, group in found.items() if group}
    others = {cell: finished_runs.departures(run, recipe(cell), free=FREE) for cell, run in first.items()}
    rows = [row(entry, found, others) for entry in entries]
    _print(rows, best_of(rows), others, why)
    if options.missing:
        print(*commands(entries, found, options.runs), sep="\n")
    entry = finished_runs.entry(options, rows)
    best = best_of(entry.rows())
    return entry.finish(claims_of(entry.rows(), best), best=best, missing_sets=why)


# ---- Which run is what


def cell_of(run: Run) -> Cell | None:
    """The cell of a run; None for runs of other recipes."""
    config, size = run.config, tuple(run.config.model.image_size)
    words = _words(config.model.name, run.model)
    if config.objective.name != "distillation" or run.model.num_classes != 1000 or words is None:
        return None
    if size == (224, 224):
        return Cell(words, 224, _rate(config.init))
    rate = RATES.get(config.schedule.lr)
    return Cell(words, 128, rate) if size == (128, 128) and rate else None


def _words(name: str, model) -> str | None:
    """The words of configs/jumbo_in1k.py for a model."""
    if name in jumbo_in1k.BASELINES:
        return name
    for size, suffix in jumbo_in1k.SIZES.items():
        if name == f"register_vit_{suffix}":
            return ",".join([size, "registers", *([f"r={model.registers}"] if model.registers != 16 else [])])
        if name == f"jumbo_vit_{suffix}":
            j, multiplier = model.jumbo, model.jumbo_multiplier
            fields = [*([f"j={j}"] if j != 6 else []), *([f"multiplier={multiplier:g}"] if multiplier != 4 else [])]
            return ",".join([size, *fields])
    return None


def _rate(begun: str | None) -> str:
    """The name of the learning rate of the run in a directory; "" where it is unknown."""
    path = pathlib.Path(begun or "") / "config.json"
    return RATES.get(configs.from_json(path).schedule.lr, "") if path.is_file() else ""


def cells_of(entry: Mapping[str, Any]) -> list[Cell]:
    """The cells of a row; a row without a rate shows the better one of several."""
    known = ["", *RATES.values()] if entry["pixels"] == 224 else RATES.values()
    return [Cell(entry["words"], entry["pixels"], rate) for rate in ([entry["rate"]] if entry["rate"] else known)]


def recipe(cell: Cell) -> str:
    stage = f"lr={cell.rate}" if cell.pixels == 128 else "224"
    return f"configs/jumbo_in1k.py:{cell.words},{stage}"


def commands(entries: Sequence[Mapping], found: Found, runs: pathlib.Path) -> list[str]:
    """Commands for the rows without a run; at 224 px from the better run at 128 px, if both rates have one."""
    lines = []
    for entry in entries:
        cells, words = cells_of(entry), entry["words"]
        stem = words.replace(",", "_").replace("=", "")
        if entry["pixels"] == 128:
            for cell in (cell for cell in cells if not found[cell]):
                lines.append(finished_runs.command(recipe(cell), runs / f"{stem}_128_{cell.rate}"))
        elif not any(found[cell] for cell in cells):
            begin = f"--config.init={_better_run(words, found)}"
            lines.append(finished_runs.command(recipe(cells[0]), runs / f"{stem}_224", begin))
    return list(dict.fromkeys(lines))


def _better_run(words: str, found: Found) -> str:
    """The directory of the better run at 128 px, or a placeholder."""
    both = [found.get(Cell(words, 128, rate), []) for rate in RATES.values()]
    if not all(both):
        return f"BETTER_RUN_OF_{words}_AT_128_PX"
    best = max(both, key=lambda runs: finished_runs.figure(runs, "eval/accuracy/top1").mean)
    return str(best[0].place)


# ---- Figures


def accuracies(runs: Sequence[Run]) -> dict[str, float]:
    """Accuracies in percent by test set and by 1 or 5, such as "val_1", means over the seeds."""
    found = {f"val_{top}": finished_runs.figure(runs, f"eval/accuracy/top{top}").mean for top in (1, 5)}
    kept = [test_sets.read(run.place) for run in runs]
    for name in (name for name in SETS if all(name in sets for sets in kept)):
        for top in (1, 5):
            found[f"{name}_{top}"] = 100 * statistics.fmean(sets[name][f"top{top}"] for sets in kept)
    if "r_1" in found:
        found["r_present_1"] = 100 * statistics.fmean(sets["r"]["present"]["top1"] for sets in kept)
    return found


def row(entry: Mapping[str, Any], found: Found, others: Mapping[Cell, list[str]]) -> dict[str, Any]:
    """A row of a table, in percent; of the better rate where the paper gives none."""
    ours = {cell: accuracies(found[cell]) for cell in cells_of(entry) if found[cell]}
    cell = max(ours, key=lambda cell: ours[cell]["val_1"], default=None)
    return dict(
        **{key: entry[key] for key in ("table", "words", "pixels")},
        label=entry["words"],
        rate=entry["rate"] or (cell and (cell.rate or "?")),
        seeds=len(found[cell]) if cell else 0,
        other_values=others.get(cell, []) if cell else [],
        **(ours[cell] if cell else {}),
        **{f"{key}_paper": entry[key] for key in FIGURES if entry[key] is not None},
    )


def best_of(rows: Sequence[dict]) -> list[dict[str, Any]]:
    """The better rate of each model at each size, of Tables 6 to 11, ours beside the paper's."""
    best = []
    judged = [r for r in rows if r["table"] != "12"]
    for words, pixels in dict.fromkeys((r["words"], r["pixels"]) for r in judged):
        there = [r for r in judged if (r["words"], r["pixels"]) == (words, pixels) and r["seeds"]]
        ours = max(there, key=lambda r: r["val_1"], default=None)
        found = dict(label=words, pixels=pixels, paper=paper_numbers.best(words, pixels), rates=len(there))
        if ours is not None:
            found |= dict(rate=ours["rate"], top1=ours["val_1"], other_values=ours["other_values"])
            found["gap"] = None if found["paper"] is None else ours["val_1"] - found["paper"]
        best.append(found)
    return best


def claims_of(rows: Sequence[dict], best: Sequence[dict]) -> list[Claim]:
    claims = []
    for r in (r for r in rows if r["seeds"] and "val_1_paper" in r):
        judged = r["table"] != "12" and not r["other_values"]
        text = f"Table {r['table']}, {r['label']}, {r['rate']}: top-1"
        claims.append(Claim(text, r["val_1"], at_least=round(r["val_1_paper"] - WITHIN, 2), judged=judged))
    found = {(r["label"], r["pixels"]): r for r in best if "top1" in r}
    for pixels in (128, 224):
        gains = {}
        for size in SIZES:
            jumbo, registers = found.get((size, pixels)), found.get((f"{size},registers", pixels))
            if jumbo and registers:
                judged = not jumbo["other_values"] and not registers["other_values"]
                text = f"{size}, {pixels} px: points of Jumbo above 16 registers"
                gains[size] = Claim(text, jumbo["top1"] - registers["top1"], at_least=0, judged=judged)
        claims += gains.values()
        for narrow, wide in itertools.pairwise(SIZES):
            if narrow in gains and wide in gains:
                a, b = gains[narrow], gains[wide]
                text = f"{pixels} px: points that Jumbo gains more at {narrow} than at {wide}"
                claims.append(Claim(text, a.ours - b.ours, at_least=0, judged=a.judged and b.judged))
    return claims


# ---- Text


def _print(rows, best, others, why):
    print("Accuracy on ImageNet's test sets, %; ours, and in brackets the paper's.")
    stars = {(b["label"], b["pixels"], b["rate"]) for b in best if b["rates"] > 1}  # both rates have runs
    lines = []
    for r in rows:
        better = r["table"] != "12" and (r["words"], r["pixels"], r["rate"]) in stars
        lines.append(r | {key: _both(r, key) for key in FIGURES} | dict(better="*" if better else ""))
    labels = {" ".join(map(str, cell)): keys for cell, keys in others.items()}
    finished_runs.show(lines, paper_numbers.TITLES, COLUMNS, labels)
    for name, reason in why.items():
        print(f"{NAMES[name]}: not evaluated: {reason}")
    if best:
        print(f"\nThe better of the rates\n{findings.table(best, BEST)}")


def _both(r: dict, key: str) -> str:
    """Ours and the paper's figure."""
    ours = "-" if r.get(key) is None else f"{r[key]:.1f}"
    return f"{ours} ({r[f'{key}_paper']})" if f"{key}_paper" in r else ours
