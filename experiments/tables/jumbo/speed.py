"""Throughput and memory of every model in Jumbo's Tables 1 and 4 to 12, and of BiXT; Figures 1 and 4 from them.

    python -m experiments tables.jumbo.speed --entry=gpu --tables=1,4,5  # a GPU: bfloat16, batches of 512
    python -m experiments tables.jumbo.speed --entry=gpu --tables=6  # everything at 224 px
    python -m experiments tables.jumbo.speed --entry=gpu --tables=7,8,9,10,11,BiXT  # and at 128 px
    python -m experiments tables.jumbo.speed --entry=gpu --tables=12
    python -m experiments tables.jumbo.speed --entry=cpu --batch=8 --runs=5 --warmup=1 --tables=7,8  # a CPU: float32

Each call ends within eight minutes on a GPU and names the models that it leaves out.  Other rows of the entry stay, so
that calls add up; each row has its commit.  All models of a size are timed in turn.  Models with batch norms are timed
as they are, and folded: the paper does not say which it timed.  Memory is the most that the compiled program needs,
parameters and images included.

Claims, on a GPU, for models timed in one call: Jumbo over 16 registers of the same width is within the paper's range
(1.15x to 1.23x at 224 px, 0.94x to 0.96x at 128 px) with a tenth to spare, and so is ViT-B with Jumbo over registers of
width 1024 (1.7x); by the paper's accuracies, no other model is both faster and more accurate than one with Jumbo.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from equivit.configs import jumbo_in1k
from experiments import compiled_models, findings, flags, machine, timing
from experiments.findings import Claim
from experiments.tables import measuring
from experiments.tables.jumbo import figures, paper_numbers

TITLES = {"1": "encoders of masked autoencoding", "4": "the Jumbo MLP", "5": "capacity"} | paper_numbers.TITLES
RATIOS = {224: (1.15, 1.23), 128: (0.94, 0.96)}  # the paper's range over widths
SPARE = 0.9
KEY = ("table", "words", "pixels", "folded")
SIZES = ("nano", "tiny", "small")  # that Jumbo and Registers share
BATCH_NORM = ("efficientvit", "shvit", "mobilenetv4")
COLUMNS = dict(label="", pixels="px", folded="", speed="images/s", paper_speed="paper", mib="MiB", paper_gb="paper, GB")
COLUMNS |= dict(ratio="over the first", paper_ratio="paper")


class Variant(NamedTuple):
    """A row: table, model, and the paper's thousands of images per second and GB, None if there are none.

    `words` are of configs/jumbo_in1k.py, or the label of Tables 1, 4 and 5; with `folded` batch norms are folded.
    """

    table: str
    words: str
    name: str
    options: Mapping[str, Any]
    pixels: int
    folded: bool = False
    paper_speed: float | None = None
    paper_gb: float | None = None

    @property
    def program(self) -> tuple:
        """The key of rows that show one model."""
        return self.name, str(sorted(self.options.items())), self.pixels, self.folded

    @property
    def turn(self) -> str:
        """Rows of one turn are timed in the same rounds."""
        shared = {"1": "Table 1", "4": "Tables 4 and 5", "5": "Tables 4 and 5", "12": f"Table 12, {self.pixels} px"}
        return shared.get(self.table, f"{self.pixels} px")

    def __str__(self):
        return f"{self.words}, {self.pixels} px{', folded' if self.folded else ''}"


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=50, warmup=10)
    parser.add_argument("--batch", type=int, default=512)
    default = pathlib.Path(__file__).with_name("accuracy.json")
    parser.add_argument("--accuracy", type=pathlib.Path, default=default, help="JSON file of accuracy.py, if it exists")
    parser.add_argument("--tables", type=flags.one_of(list(TITLES)), default=list(TITLES), help="(all)")
    options = parser.parse_args(arguments)
    budget, turns, rows = timing.Budget(options.minutes), {}, []
    wanted = [variant for variant in variants() if variant.table in options.tables]
    for variant in wanted:
        turns.setdefault(variant.turn, []).append(variant)
    settings = dict(batch=options.batch, compute="bfloat16" if machine.on_gpu() else "float32")
    entry = findings.Entry(options, settings, budget)
    entry.keep(KEY, [tuple(getattr(variant, field) for field in KEY) for variant in wanted])
    for name, group in turns.items():
        if found := timed(name, group, options, budget):
            entry.add(found)
            rows += found
    show(rows)
    status = entry.finish(claims_of(rows))
    best = findings.read_json(options.accuracy).get("main", {}).get("best", [])
    if rows:
        figures.draw(findings.read(options)[options.entry], best, findings.picture(options))
    return status


def variants() -> list[Variant]:
    """All rows of all tables, and registers of the smallest width, which the paper does not have."""
    found = []
    for c in paper_numbers.COSTS:
        options = {"num_classes": 1000, **c["options"]}
        found.append(Variant(c["table"], c["label"], c["name"], options, 224, False, c["speed"], c["memory"]))
    speeds: dict[tuple[str, str, int], float | None] = dict(paper_numbers.speeds())
    speeds |= {("6", "pico,registers", 224): None, ("7", "pico,registers", 128): None}
    speeds |= {("BiXT", "bixt_ti_p16", pixels): None for pixels in RATIOS}
    for (table, words, pixels), speed in speeds.items():
        model = dict(jumbo_in1k.get_config(f"{words},{pixels}").model) | dict(num_classes=1000)
        name = model.pop("name")
        for folded in (False, True) if name.startswith(BATCH_NORM) else (False,):
            found.append(Variant(table, words, name, model, pixels, folded, speed))
    return found


def timed(turn: str, group: Sequence[Variant], options, budget: timing.Budget) -> list[dict[str, Any]]:
    """The rows of a turn, images per second and MiB; models that two rows share are timed once."""

    def program(variant):
        common = dict(batch=options.batch, precision="mixed" if machine.on_gpu() else "float32")
        return compiled_models.forward(variant.name, folded=variant.folded, **common, **variant.options)

    programs = {}
    for key, variant in {variant.program: variant for variant in group}.items():
        if (compiled := measuring.attempt(budget, str(variant), program, variant)) is not None:
            programs[key] = compiled
    seconds = {}
    with budget.trying(turn):
        seconds = measuring.seconds(programs, options)
    rows = []
    for variant in (variant for variant in group if variant.program in seconds):
        memory, paper = programs[variant.program].memory, variant.paper_speed
        row = {key: getattr(variant, key) for key in ("table", "words", "pixels", "folded", "paper_gb")}
        row |= dict(speed=options.batch / seconds[variant.program], paper_speed=paper and 1000 * paper)
        rows.append(row | dict(mib=memory and memory.peak / 2**20))
    return rows


def claims_of(rows: Sequence[dict]) -> list[Claim]:
    """Claims about rows that were timed in one call; of a model with batch norms the faster of folded and not."""
    gpu, claims, speeds = machine.on_gpu(), [], {}
    for r in (r for r in rows if r["table"] not in ("1", "4", "5", "12")):
        key = r["words"], r["pixels"]
        speeds[key] = max(r["speed"], speeds.get(key, 0.0))
    for pixels, (low, high) in RATIOS.items():
        both = [[speeds.get((f"{size}{kind}", pixels)) for kind in ("", ",registers")] for size in SIZES]
        ratios = [jumbo / registers for jumbo, registers in both if jumbo and registers]
        text = f"Jumbo over Registers at {pixels} px, {{}} over widths (paper {low} to {high})"
        smallest, largest = min(ratios, default=None), max(ratios, default=None)
        claims.append(Claim(text.format("smallest"), smallest, at_least=low * SPARE, judged=gpu))
        claims.append(Claim(text.format("largest"), largest, at_most=high / SPARE, judged=gpu))
        behind = dominated({words: s for (words, at), s in speeds.items() if at == pixels}, pixels)
        text = f"models with Jumbo that another beats in speed and the paper's accuracy at {pixels} px"
        claims.append(Claim(text, behind, at_most=0, judged=gpu))
    capacity = {r["words"]: r["speed"] for r in rows if r["table"] == "5"}
    ratio = timing.ratio(capacity.get("ViT-B, Jumbo"), capacity.get("Registers, width 1024"))
    return [*claims, Claim("ViT-B, Jumbo over Registers of width 1024", ratio, at_least=3.1 / 1.8 * SPARE, judged=gpu)]


def dominated(speeds: Mapping[str, float], pixels: int) -> int | None:
    """Models with Jumbo that are slower and, by the paper's accuracies, worse than one without; None: no pair."""
    points = [(words, speed, paper_numbers.best(words, pixels)) for words, speed in speeds.items()]
    points = [(words, speed, top1) for words, speed, top1 in points if top1 is not None]
    jumbo = [point for point in points if point[0] in jumbo_in1k.SIZES]
    others = [point for point in points if point not in jumbo]
    if not jumbo or not others:
        return None
    return sum(any(other[1] > speed and other[2] > top1 for other in others) for _, speed, top1 in jumbo)


def show(rows: Sequence[dict]) -> None:
    """Print the tables; ratios are over the speed of the first row of a table and size."""
    for table, title in TITLES.items():
        lines, first = [], {}
        for r in (r for r in rows if r["table"] == table):
            base = first.setdefault(r["pixels"], r)
            ratio, paper = r["speed"] / base["speed"], timing.ratio(r["paper_speed"], base["paper_speed"])
            folded = "folded" if r["folded"] else ""
            lines.append({**r, "label": r["words"], "folded": folded, "ratio": ratio, "paper_ratio": paper})
        if lines:
            print(f"\nTable {table}: {title}\n{findings.table(lines, COLUMNS)}")
