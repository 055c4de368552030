"""Jumbo's Tables 3, 13 and 14: PatchTST plain, with registers and with a Jumbo token, from the results of a sweep.

    python -m equivit.sweep --config=configs/timeseries.py --workdir=runs/timeseries --config.data.directory=/data/ucr
    python -m experiments tables.jumbo.timeseries runs/timeseries  # some seconds

For each set: test accuracy of the run that is best on validation, and the mean over the runs, beside the paper's; then
mean ranks of the three models (1 is best, equals share the mean of their ranks) over the sets that have all three.
Claims: the ranks of the paper's Table 3 are possible by its Tables 13 and 14, where equal rounded accuracies may have
had either order.
"""

import json
import pathlib
import statistics

from experiments import findings, flags
from experiments.findings import Claim

MODELS = ("patchtst", "patchtst_registers", "patchtst_jumbo")
KINDS = ("best", "mean")
# Plain, registers, Jumbo with 8 patches and then with 42, in percent: "best" of Tables 13 and 14, then their "Avg".
PAPER = {
    "univariate": {
        "Sleep": "70.9 70.7 73.3 70.5 70.6 70.3 | 67.5 67.7 68.3 67.2 67.1 67.6",
        "InsectSound": "82.8 83.3 83.7 85.8 84.4 85.6 | 76.7 76.0 78.7 78.7 78.7 79.7",
        "FruitFlies": "92.2 90.9 92.2 95.2 95.0 95.1 | 88.4 88.4 89.4 93.1 92.9 93.9",
        "RightWhaleCalls": "94.3 93.8 95.1 96.7 97.0 96.1 | 92.8 93.5 94.2 94.0 94.8 95.1",
        "FaultDetectionA": "98.0 97.7 98.1 99.6 99.8 99.8 | 94.6 95.2 97.2 99.2 99.2 99.5",
        "ElectricDevices": "89.0 88.8 90.1 92.4 92.4 92.5 | 81.6 83.2 84.0 85.1 85.2 88.1",
        "Crop": "80.9 81.2 82.0 81.2 80.6 82.2 | 69.4 70.9 72.0 68.7 68.3 68.7",
        "FordB": "98.8 97.3 97.7 97.7 96.5 96.5 | 95.4 96.0 96.6 95.7 94.9 94.8",
        "FordA": "97.3 98.0 97.7 97.1 97.1 97.5 | 96.1 96.6 97.2 95.5 95.7 96.0",
        "MelbournePedestrian": "92.1 91.5 91.0 90.4 91.0 93.1 | 81.8 82.8 83.9 83.5 83.8 84.9",
    },
    "multivariate": {
        "Tiselac": "96.6 96.9 97.2 96.4 96.4 96.7 | 86.9 87.8 90.1 84.7 85.0 87.9",
        "WalkingSittingStanding": "96.0 96.0 96.5 98.0 97.6 97.6 | 91.7 89.8 93.5 93.9 93.9 94.5",
        "SpokenArabicDigits": "99.9 99.7 99.9 99.7 99.9 99.9 | 99.5 99.6 99.6 99.6 99.5 99.7",
        "FaceDetection": "87.8 88.1 87.5 86.8 86.6 84.8 | 78.9 80.9 80.0 77.4 77.4 78.8",
        "PhonemeSpectra": "56.3 57.1 59.1 57.6 60.3 58.9 | 38.2 38.7 46.5 42.9 44.5 47.7",
        "LSST": "78.7 79.5 79.9 74.6 75.7 79.9 | 69.3 69.4 71.2 61.4 61.4 67.3",
        "UWaveGestureLibrary": "92.7 88.5 87.5 94.8 99.0 94.8 | 76.8 79.9 83.4 81.3 83.5 85.4",
        "CharacterTrajectories": "99.0 98.0 99.6 98.7 99.3 98.4 | 93.6 94.2 96.6 96.6 95.2 97.0",
        "AsphaltPavementTypeCoordinates": "72.3 77.7 81.1 89.5 88.5 89.5 | 72.7 75.8 77.0 81.2 82.1 83.7",
        "MotorImagery": "87.5 83.3 77.1 79.2 66.7 87.5 | 84.9 83.3 83.2 73.6 74.0 81.9",
    },
}
# Table 3; None: the cell cannot be read in our copy.
TABLE_3 = {
    ("univariate", "best"): {8: (2.0, 2.5, 1.5), 42: (1.9, 2.1, 1.7)},
    ("univariate", "mean"): {8: (2.9, 2.1, None), 42: (2.3, 2.4, None)},
    ("multivariate", "best"): {8: (2.1, 2.1, 1.6), 42: (2.0, 1.9, 1.7)},
    ("multivariate", "mean"): {8: (2.7, 2.0, None), 42: (2.6, 2.4, None)},
}


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("results", type=pathlib.Path, help="the --workdir of equivit.sweep")
    options = parser.parse_args(arguments)
    runs = read(options.results)
    ours, theirs = accuracies(runs), paper()
    print(summary(runs), "Test accuracy, %; in brackets the paper's.", sep="\n\n")
    print(findings.table(set_cells(ours, theirs), COLUMNS), *empty(ours, theirs), sep="\n\n")
    print(f"\nMean ranks; in brackets the paper's, on its {len(PAPER['univariate'])} sets.\n")
    print(findings.table(rank_cells(ours), COLUMNS))
    return findings.finish(options, dict(rows=rows(ours), ranks=rank_rows(ours), runs=runs), claims_of(theirs))


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
    """The paper's accuracies in the same form."""
    found = {}
    for group, sets in PAPER.items():
        for name, text in sets.items():
            for kind, part in zip(KINDS, text.split("|"), strict=True):
                values = tuple(map(float, part.split()))
                for patches, three in ((8, values[:3]), (42, values[3:])):
                    found.setdefault((group, kind, patches), {})[name] = three
    return found


def ranks(values: tuple[float, ...]) -> tuple[float, ...]:
    """1 for the highest; equals share the mean of their ranks."""
    return tuple(1 + sum(b > a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values)


def mean_ranks(sets: dict[str, tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(statistics.fmean, zip(*map(ranks, sets.values()), strict=True)))


def rows(ours: dict) -> list[dict]:
    return [
        dict(group=group, kind=kind, patches=patches, data=name, **dict(zip(MODELS, values, strict=True)))
        for (group, kind, patches), sets in sorted(ours.items())
        for name, values in sets.items()
    ]


def rank_rows(ours: dict) -> list[dict]:
    """Mean ranks of each group, and of all sets together where there are two groups."""
    result = []
    for patches in sorted({key[2] for key in ours}):
        for kind in KINDS:
            groups = {g: whole(ours.get((g, kind, patches), {})) for g in PAPER}
            groups = {group: sets for group, sets in groups.items() if sets}
            if len(groups) > 1:
                groups["all"] = {name: values for sets in groups.values() for name, values in sets.items()}
            for group, sets in groups.items():
                three = dict(zip(MODELS, mean_ranks(sets), strict=True))
                result.append(dict(group=group, kind=kind, patches=patches, sets=len(sets), **three))
    return result


def summary(results: list[dict]) -> str:
    """The recipe in a line."""
    first, seconds = results[0], sum(r["seconds"] for r in results)
    epochs = sorted({r["epochs"] for r in results})
    return (
        f"{len(first['runs'])} runs of {' or '.join(map(str, epochs))} epochs, batch {first['recipe']['batch_size']}, "
        f"seed {first['recipe']['seed']}; {len(results)} sweeps in {seconds / 60:.0f} minutes on {first['device']}."
    )


COLUMNS = dict(data="set", patches="patches", kind="") | {name: name.removeprefix("patchtst_") for name in MODELS}


def set_cells(ours: dict, theirs: dict) -> list[dict]:
    """The rows of the table of sets, ours and in brackets the paper's."""
    lines, nothing = [], (None,) * len(MODELS)
    for (group, kind, patches), sets in ours.items():
        published = theirs.get((group, kind, patches), {})
        for name in {**published, **sets}:
            three = _both(sets.get(name, nothing), published.get(name, nothing), 1)
            lines.append(dict(data=name, patches=patches, kind=kind, **three))
    return sorted(lines, key=lambda line: (line["data"], line["patches"], line["kind"]))


def rank_cells(ours: dict) -> list[dict]:
    """The same of the table of ranks."""
    lines = []
    for row in rank_rows(ours):
        published = TABLE_3.get((row["group"], row["kind"]), {}).get(row["patches"], (None,) * 3)
        lines.append(
            {**row, "data": f"{row['group']} ({row['sets']})", **_both([row[m] for m in MODELS], published, 2)}
        )
    return lines


def _both(ours, theirs, digits: int) -> dict[str, str | None]:
    pairs = zip(MODELS, ours, theirs, strict=True)
    texts = {m: ["" if v is None else f"{v:.{digits}f}", f"({p})" if p else ""] for m, v, p in pairs}
    return {model: " ".join(filter(None, both)) or None for model, both in texts.items()}


def empty(ours: dict, theirs: dict) -> list[str]:
    """A line with the paper's sets that have empty cells, if there are any."""
    names = {n: None for key, sets in ours.items() for n in theirs.get(key, {}) if n not in whole(sets)}
    return [f"Cells are empty where there are no data or no result: {', '.join(names)}."] if names else []


def claims_of(theirs: dict) -> list[Claim]:
    """Each mean rank of Table 3 against the lowest and the highest that the rounded accuracies allow."""
    claims = []
    for (group, kind), by_patches in TABLE_3.items():
        for patches, published in by_patches.items():
            bounds = rank_bounds(theirs[group, kind, patches])
            off = max(max(low - p, p - high) for p, low, high in zip(published, *bounds, strict=True) if p is not None)
            text = f"mean ranks of Table 3 outside of what its accuracies allow, {group}, {kind}, {patches} patches"
            claims.append(Claim(text, max(off, 0.0), at_most=1e-9))
    return claims


def rank_bounds(sets: dict[str, tuple[float, ...]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean ranks with every tie won, and with every tie lost."""
    won = [[1 + sum(b > a for b in values) for a in values] for values in sets.values()]
    lost = [[sum(b >= a for b in values) for a in values] for values in sets.values()]
    return tuple(tuple(map(statistics.fmean, zip(*each, strict=True))) for each in (won, lost))
