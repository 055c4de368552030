"""PatchTST on fourteen small sets: does the order of Jumbo's Table 3 come out?

    python -m experiments studies.jumbo_time_series  # reads the JSON file
    python -m experiments studies.jumbo_time_series --directory=/data/ucr --output=mine.json  # 42 sweeps of 4 runs
    python -m experiments studies.jumbo_time_series --config=configs/timeseries.py:small,public --output=mine.json

The paper "closely follows" PatchTST.  Public PatchTST has batch norms after each branch, residual attention and series
normalised one by one; ours has layer norms before each branch.  A model is trained plain, with registers and with a
Jumbo token, by configs/timeseries.py; `public` in the mode trains the public form too.  A seed changes weights, dropout
and the order of series.  The JSON file holds the results of all sweeps; missing ones are computed, and the same command
resumes.  Printed are, for each seed, mean ranks over the sets and whether their order is the paper's, and differences
between models with standard errors over the sets, beside those that follow from the paper's Tables 13 and 14.
"""

import itertools
import json
import statistics

from equivit import files, sweep
from equivit.training import config as configs
from equivit.training import sweep_config
from experiments import findings
from experiments.studies import differences, several_seeds
from experiments.tables.jumbo import timeseries
from experiments.tables.jumbo.timeseries import KINDS

VARIANTS = {
    "ours": timeseries.MODELS,
    "public": ("patchtst_public", "patchtst_public_registers", "patchtst_public_jumbo"),
}
WORDS = ("plain", "registers", "Jumbo")
# Table 3, ten univariate sets, 8 patches; the mean rank of Jumbo's mean is 1.0 by Table 13, its cell cannot be read.
PAPER = {"best": (2.0, 2.5, 1.5), "mean": (2.9, 2.1, 1.0)}


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__, epochs=False, source=False)
    parser.add_argument("--directory", help="of the data sets; without it aeon reads them")
    parser.add_argument("--config", default="configs/timeseries.py:small")
    parser.set_defaults(seeds=[0])
    options = several_seeds.parse(parser, arguments)
    sweeps = findings.read(options).get(options.entry, {}).get("sweeps", {})
    found = {seed: _results(options, seed, sweeps) for seed in options.seeds}
    pairs = itertools.product(VARIANTS, KINDS)
    rows = [row for variant, kind in pairs if (row := compared(found, variant, kind)) is not None]
    for row in rows:
        print(described(row))
    recipe = next(iter(found.values()))[0]["recipe"]
    for seed, results in found.items():
        for result in results:  # by the name of its file in the --workdir
            sweeps[f"seed_{seed}/{result['data']}-{result['model']}-{result['patches']}"] = result
    return findings.finish(options, dict(recipe=recipe, seeds=options.seeds, rows=rows, sweeps=sweeps), [])


def _results(options, seed: int, sweeps: dict[str, dict]) -> list[dict]:
    """All sweeps of one seed; equivit.sweep takes known ones from --workdir and computes the others."""
    for place, result in sweeps.items():
        if place.startswith(f"seed_{seed}/"):
            files.write_text(options.workdir / f"{place}.json", json.dumps(result, indent=1) + "\n")
    directory = [f"data.directory={options.directory}"] if options.directory else []
    changes = [f"seed={seed}", *directory, *options.override]
    config = configs.load(options.config, changes, schema=sweep_config.SCHEMA)
    return sweep.run(config, options.workdir / f"seed_{seed}")


def compared(found: dict[int, list[dict]], variant: str, kind: str) -> dict | None:
    """Ranks of the three models in each seed, and the differences of their accuracies in the mean over the sets.

    Only sets with all three models in each seed count; None if there are none.
    """
    by_seed = {seed: _whole(results, variant, kind) for seed, results in found.items()}
    shared = sorted(set.intersection(*map(set, by_seed.values())))
    if not shared:
        return None
    tables = {seed: {key: sets[key] for key in shared} for seed, sets in by_seed.items()}
    ranks = {seed: timeseries.mean_ranks(sets) for seed, sets in tables.items()}
    means = [[statistics.fmean(three) / 100 for three in zip(*sets.values(), strict=True)] for sets in tables.values()]
    accuracy = dict(zip(WORDS, zip(*means, strict=True), strict=True))
    row = dict(variant=variant, kind=kind, sets=sorted({name for name, _ in shared}), ranks=ranks, accuracy=accuracy)
    row["as_in_the_paper"] = {seed: order(values) == order(PAPER[kind]) for seed, values in ranks.items()}
    return row | dict(gains=gains(tables), paper=gains({0: timeseries.paper()["univariate", kind, 8]}))


def gains(tables: dict[int, dict]) -> dict[str, dict[str, float | None]]:
    """Jumbo minus each of the others, from {seed: {set: (plain, registers, Jumbo)}} in percent.

    A claim about models is one about other sets: the sets tried here are a sample, and seeds are averaged first.
    """
    of_sets = zip(*(sets.values() for sets in tables.values()), strict=True)
    means = [[statistics.fmean(model) / 100 for model in zip(*seeds, strict=True)] for seeds in of_sets]
    *others, jumbo = zip(*means, strict=True)
    pairs = zip(WORDS[:2], others, strict=True)
    return {f"Jumbo - {word}": differences.paired_difference(jumbo, other) for word, other in pairs}


def _whole(results: list[dict], variant: str, kind: str) -> dict:
    """{(set, patches): (plain, registers, Jumbo)} in percent, where there are all three."""
    found = timeseries.accuracies(results, VARIANTS[variant]).items()
    tables = [(patches, timeseries.whole(sets)) for (_, each, patches), sets in found if each == kind]
    return {(name, patches): values for patches, sets in tables for name, values in sets.items()}


def order(ranks: tuple[float, ...]) -> tuple[tuple[str, ...], ...]:
    """The models from best to worst; equals share a place."""
    return tuple(tuple(w for w, r in zip(WORDS, ranks, strict=True) if r == value) for value in sorted(set(ranks)))


def described(row: dict) -> str:
    """A row as lines of text."""
    lines = [f"{row['variant']}, {row['kind']} of the runs, {len(row['sets'])} sets"]
    for seed, ranks in row["ranks"].items():
        verdict = "as in the paper" if row["as_in_the_paper"][seed] else "not the paper's"
        lines.append(f"  seed {seed}: mean ranks {_ranks(ranks)}; the order is {verdict}")
    means = ", ".join(f"{word} {several_seeds.spread(values)} %" for word, values in row["accuracy"].items())
    lines.append(f"  accuracy, mean of the sets and its spread over seeds: {means}")
    for key, where in (("gains", ""), ("paper", " in the paper's ten univariate sets")):
        lines += [f"  {name}{where}: {differences.verdict(gain)}" for name, gain in row[key].items()]
    agreeing = sum(row["as_in_the_paper"].values())
    lines.append(f"  the paper's order ({_ranks(PAPER[row['kind']])}) in {agreeing} of {len(row['ranks'])} seeds")
    return "\n".join(lines)


def _ranks(ranks: tuple[float, ...]) -> str:
    return ", ".join(f"{word} {rank:.2f}" for word, rank in zip(WORDS, ranks, strict=True))
