r"""PatchTST by the choices of its public code beside ours: does the order of Jumbo's Table 3 come out?

The paper "closely follows" PatchTST and does not say how closely.  Public PatchTST has batch norms after each branch,
residual attention and series that are normalised one by one; ours has layer norms before each branch and none of the
rest.  Both plain, with registers and with a Jumbo token, by the recipe of configs/timeseries.py, on six small sets.

    python experiments/jumbo_timeseries_public.py runs/public --directory=/data/ucr      # 108 sweeps of 12 runs
    python experiments/jumbo_timeseries_public.py /tmp/public --config=configs/timeseries.py:quicktest,public

Goes on where it was stopped: each seed has a --workdir of equivit.sweep, seed_0 and so on.  A seed changes weights,
dropout and the order of series, not which half of the test set is for validation; nor does it change the programs, so
that with JAX_COMPILATION_CACHE_DIR set only the first one compiles.  Prints, for each kind and seed, the mean ranks
over the sets, whether their order is the paper's, and the differences between models with their standard errors over
seeds; writes JSON.  A difference below two standard errors is called not resolved.
"""

import itertools
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from equivit import sweep
from equivit.training import config as configs
from equivit.training import sweep_config
from experiments import benchmark, jumbo_timeseries, small_images
from experiments.jumbo_timeseries import KINDS

VARIANTS = {
    "ours": jumbo_timeseries.MODELS,
    "public": ("patchtst_public", "patchtst_public_registers", "patchtst_public_jumbo"),
}
WORDS = ("plain", "registers", "Jumbo")
# Table 3, ten univariate sets, 8 patches; the mean rank of Jumbo's mean is 1.0 by Table 13, its cell cannot be read.
PAPER = {"best": (2.0, 2.5, 1.5), "mean": (2.9, 2.1, 1.0)}


def main(arguments=None) -> int:
    options = _options(arguments)
    try:
        found = {seed: _results(options, seed) for seed in options.seeds}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    pairs = itertools.product(VARIANTS, KINDS)
    rows = [row for variant, kind in pairs if (row := compared(found, variant, kind)) is not None]
    for row in rows:
        print(described(row))
    recipe = next(iter(found.values()))[0]["recipe"]
    return benchmark.finish(options.output, dict(recipe=recipe, seeds=options.seeds, rows=rows), [])


def _options(arguments):
    parser = benchmark.parser(__doc__, output="jumbo_timeseries_public.json")
    parser.add_argument("workdir", type=pathlib.Path, help="where the results go; those that are there are kept")
    parser.add_argument("--directory", help="of the data sets; without it aeon reads them")
    parser.add_argument("--config", default="configs/timeseries.py:smallest,public")
    parser.add_argument("--seeds", default=[0, 1, 2], type=benchmark.each_at_least(0))
    parser.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    return parser.parse_args(arguments)


def _results(options, seed: int) -> list[dict]:
    """All sweeps of one seed."""
    directory = [f"data.directory={options.directory}"] if options.directory else []
    changes = [f"seed={seed}", *directory, *options.override]
    config = configs.load(options.config, changes, schema=sweep_config.SCHEMA)
    return sweep.run(config, options.workdir / f"seed_{seed}")


def compared(found: dict[int, list[dict]], variant: str, kind: str) -> dict | None:
    """Ranks of the three models in each seed, and the differences of their accuracies in the mean over the sets.

    Only sets of which each seed has all three are used; None if there are none.
    """
    by_seed = {seed: _whole(results, variant, kind) for seed, results in found.items()}
    shared = sorted(set.intersection(*map(set, by_seed.values())))
    if not shared:
        return None
    tables = {seed: {key: sets[key] for key in shared} for seed, sets in by_seed.items()}
    ranks = {seed: jumbo_timeseries.mean_ranks(sets) for seed, sets in tables.items()}
    means = [[statistics.fmean(three) / 100 for three in zip(*sets.values(), strict=True)] for sets in tables.values()]
    accuracy = dict(zip(WORDS, zip(*means, strict=True), strict=True))
    gains = {}
    for other in ("plain", "registers"):
        gap, error = small_images.difference(accuracy["Jumbo"], accuracy[other])
        gains[f"Jumbo - {other}"] = dict(gap=gap, error=error)
    return dict(
        variant=variant,
        kind=kind,
        sets=sorted({name for name, _ in shared}),
        ranks=ranks,
        accuracy=accuracy,
        as_in_the_paper={seed: order(values) == order(PAPER[kind]) for seed, values in ranks.items()},
        gains=gains,
    )


def _whole(results: list[dict], variant: str, kind: str) -> dict:
    """{(set, patches): (plain, registers, Jumbo)} in percent, where there are all three."""
    found = jumbo_timeseries.accuracies(results, VARIANTS[variant]).items()
    tables = [(patches, jumbo_timeseries.whole(sets)) for (_, each, patches), sets in found if each == kind]
    return {(name, patches): values for patches, sets in tables for name, values in sets.items()}


def order(ranks: tuple[float, ...]) -> tuple[tuple[str, ...], ...]:
    """The models from best to worst; equals share a place."""
    return tuple(tuple(w for w, r in zip(WORDS, ranks, strict=True) if r == value) for value in sorted(set(ranks)))


def described(row: dict) -> str:
    """A row as lines."""
    lines = [f"{row['variant']}, {row['kind']} of the runs, {len(row['sets'])} sets"]
    for seed, ranks in row["ranks"].items():
        said = "as in the paper" if row["as_in_the_paper"][seed] else "not the paper's"
        lines.append(f"  seed {seed}: mean ranks {_ranks(ranks)}; the order is {said}")
    said = ", ".join(f"{word} {small_images.spread(values)} %" for word, values in row["accuracy"].items())
    lines.append(f"  accuracy, mean of the sets and its spread over seeds: {said}")
    lines += [f"  {name}: {small_images.verdict(**gain)}" for name, gain in row["gains"].items()]
    agreeing = sum(row["as_in_the_paper"].values())
    lines.append(f"  the paper's order ({_ranks(PAPER[row['kind']])}) in {agreeing} of {len(row['ranks'])} seeds")
    return "\n".join(lines)


def _ranks(ranks: tuple[float, ...]) -> str:
    return ", ".join(f"{word} {rank:.2f}" for word, rank in zip(WORDS, ranks, strict=True))


if __name__ == "__main__":
    sys.exit(main())
