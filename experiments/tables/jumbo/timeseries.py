"""Jumbo's Tables 3, 13 and 14: PatchTST plain, with registers and with a Jumbo token, from the results of a sweep.

    python -m equivit.sweep --config=configs/timeseries.py --workdir=runs/timeseries --config.data.directory=/data/ucr
    python -m experiments tables.jumbo.timeseries runs/timeseries  # some seconds

For each set: test accuracy of the run that is best on validation, and the mean over the runs, beside the paper's; then
mean ranks of the three models (1 is best, equals share the mean of their ranks) over the sets that have all three.
Claims: the ranks of the paper's Table 3 are possible by its Tables 13 and 14, where equal rounded accuracies may have
had either order.
"""

import itertools
import json
import pathlib
import statistics

import numpy as np
from scipy import stats

from experiments import findings, flags
from experiments.findings import Claim
from experiments.tables import papers

MODELS = ("patchtst", "patchtst_registers", "patchtst_jumbo")
KINDS = ("best", "mean")
GROUPS = ("univariate", "multivariate")
COLUMNS = dict(data="set", patches="patches", kind="") | {name: name.removeprefix("patchtst_") for name in MODELS}
NOTHING = (None,) * len(MODELS)


def _paper(file: str) -> list[tuple]:
    return [tuple(row.values()) for row in papers.rows(__file__, file, words=("group", "kind", "data"))]


TABLE_3 = {row[:3]: row[3:] for row in _paper("paper_timeseries_ranks.csv")}  # None: cannot be read in our copy


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("results", type=pathlib.Path, help="the --workdir of equivit.sweep")
    options = parser.parse_args(arguments)
    runs = read(options.results)
    ours, theirs = accuracies(runs), paper()
    print(summary(runs), "Test accuracy, %; in brackets the paper's.", sep="\n\n")
    print(findings.table(set_cells(ours, theirs), COLUMNS), *empty(ours, theirs), sep="\n\n")
    print(f"\nMean ranks; in brackets the paper's, on its {len(theirs['univariate', 'best', 8])} sets.\n")
    print(findings.table(rank_cells(ours), COLUMNS))
    return findings.finish(options, dict(rows=rows(ours), ranks=rank_rows(ours)), claims_of(theirs))


def read(directory: pathlib.Path) -> list[dict]:
    """The results of a sweep, of one recipe.  Raises ValueError if there are none, or of several."""
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    if not results:
        raise ValueError(f"{directory}: there are no results of equivit.sweep in it.")
    if any(result["recipe"] != results[0]["recipe"] for result in results):
        raise ValueError(f"{directory}: results of several recipes; a table needs one.")
    return results


def accuracies(results: list[dict], models: tuple[str, ...] = MODELS) -> dict:
    """{(group, kind, patches): {set: (plain, registers, Jumbo)}} in percent; None for a model without a result."""
    found = {}
    for r in results:
        group = "univariate" if r["channels"] == 1 else "multivariate"
        for kind, value in (("best", r["best"]["test"]), ("mean", r["test_mean"])):
            percent = round(100 * value, 4)  # float32 means of equal accuracies differ in the last digit
            found.setdefault((group, kind, r["patches"]), {}).setdefault(r["data"], {})[r["model"]] = percent
    return {key: {name: tuple(by.get(m) for m in models) for name, by in sets.items()} for key, sets in found.items()}


def whole(sets: dict) -> dict:
    """The sets that have a result of each model."""
    return {name: values for name, values in sets.items() if None not in values}


def paper() -> dict:
    """The paper's accuracies in the same form, Tables 13 and 14: "best", and their "Avg"."""
    found = {}
    for group, kind, patches, name, *values in _paper("paper_timeseries.csv"):
        found.setdefault((group, kind, patches), {})[name] = tuple(values)
    return found


def ranks(values: tuple[float, ...], ties: str = "average") -> tuple[float, ...]:
    """1 for the highest; equals share the mean of their ranks, or all have the best ("min") or the worst ("max")."""
    return tuple(stats.rankdata(np.negative(values), ties).tolist())


def mean_ranks(sets: dict[str, tuple[float, ...]], ties: str = "average") -> tuple[float, ...]:
    return tuple(map(statistics.fmean, zip(*(ranks(values, ties) for values in sets.values()), strict=True)))


def rows(ours: dict) -> list[dict]:
    return [
        dict(group=group, kind=kind, patches=patches, data=name, **dict(zip(MODELS, values, strict=True)))
        for (group, kind, patches), sets in sorted(ours.items())
        for name, values in sets.items()
    ]


def rank_rows(ours: dict) -> list[dict]:
    """Mean ranks of each group, and of all sets together where there are two groups."""
    result = []
    for patches, kind in itertools.product(sorted({key[2] for key in ours}), KINDS):
        groups = {group: whole(ours.get((group, kind, patches), {})) for group in GROUPS}
        groups = {group: sets for group, sets in groups.items() if sets}
        if len(groups) > 1:
            groups["all"] = {name: values for sets in groups.values() for name, values in sets.items()}
        for group, sets in groups.items():
            three = dict(zip(MODELS, mean_ranks(sets), strict=True))
            result.append(dict(group=group, kind=kind, patches=patches, sets=len(sets), **three))
    return result


def summary(results: list[dict]) -> str:
    """The recipe in a line."""
    first, minutes = results[0], sum(r["seconds"] for r in results) / 60
    epochs = " or ".join(map(str, sorted({r["epochs"] for r in results})))
    steps = first["recipe"].get("steps")
    length = f"{steps:,} steps" if steps else f"{epochs} epochs"
    recipe = f"{length}, batch {first['recipe']['batch_size']}, seed {first['recipe']['seed']}"
    device = first["device"]
    return f"{len(first['runs'])} runs of {recipe}; {len(results)} sweeps in {minutes:.0f} minutes on {device}."


def set_cells(ours: dict, theirs: dict) -> list[dict]:
    """The rows of the table of sets, ours and in brackets the paper's."""
    lines = []
    for (group, kind, patches), sets in ours.items():
        published = theirs.get((group, kind, patches), {})
        for name in {**published, **sets}:
            three = _both(sets.get(name, NOTHING), published.get(name, NOTHING), 1)
            lines.append(dict(data=name, patches=patches, kind=kind, **three))
    return sorted(lines, key=lambda line: (line["data"], line["patches"], line["kind"]))


def rank_cells(ours: dict) -> list[dict]:
    """The same of the table of ranks."""
    lines = []
    for row in rank_rows(ours):
        published = TABLE_3.get((row["group"], row["kind"], row["patches"]), NOTHING)
        three = _both([row[model] for model in MODELS], published, 2)
        lines.append({**row, "data": f"{row['group']} ({row['sets']})", **three})
    return lines


def _both(ours, theirs, digits: int) -> dict[str, str | None]:
    found = {}
    for model, value, published in zip(MODELS, ours, theirs, strict=True):
        texts = ["" if value is None else f"{value:.{digits}f}", f"({published})" if published else ""]
        found[model] = " ".join(filter(None, texts)) or None
    return found


def empty(ours: dict, theirs: dict) -> list[str]:
    """A line with the paper's sets that have empty cells, if there are any."""
    names = {n: None for key, sets in ours.items() for n in theirs.get(key, {}) if n not in whole(sets)}
    return [f"Cells are empty where there are no data or no result: {', '.join(names)}."] if names else []


def claims_of(theirs: dict) -> list[Claim]:
    """Each mean rank of Table 3 against the lowest and the highest that the rounded accuracies allow."""
    claims = []
    for (group, kind, patches), published in TABLE_3.items():
        bounds = [mean_ranks(theirs[group, kind, patches], ties) for ties in ("min", "max")]
        off = max(max(low - p, p - high) for p, low, high in zip(published, *bounds, strict=True) if p is not None)
        text = f"mean ranks of Table 3 outside of what its accuracies allow, {group}, {kind}, {patches} patches"
        claims.append(Claim(text, max(off, 0.0), at_most=1e-9))
    return claims
