"""Figures of experiments/studies/jumbo.md."""

import statistics

from scipy import special

from experiments.studies import differences, jumbo_time_series
from experiments.tables.jumbo import timeseries
from tests.experiments.pages.figures import ROOT, Page, entry, error, gap, spread, verdict

PAGE = Page("studies/jumbo")
SETS = ("Crop", "MelbournePedestrian")  # the paper's, but for ElectricDevices
XAVIER = {48: "xavier", 96: "xavier_96", 192: "xavier_192"}  # entries of `jumbo_rates` by width


@PAGE.table("width | 96 | 128 | 192")
def jumbo_small_images():
    found = entry("studies/jumbo_small_images")
    for model, name in (("plain", "plain"), ("registers", "registers"), ("jumbo", "Jumbo")):
        cells = [spread(found["rows"][f"{model} {w}"]["eval/accuracy/top1"]["values"]) for w in (96, 128, 192)]
        yield [name, *cells]
    gains = [found["gains"][f"jumbo - registers, {width}"] for width in (96, 128, 192)]
    cells = [f"{100 * gain['gap']:.1f} ({100 * gain['standard_error']:.1f})" for gain in gains]
    yield ["Jumbo over registers (standard error)", *cells]


@PAGE.table("width 48, 64 patches | best rate | test accuracy | training loss | over registers (standard error)")
def jumbo_rates():
    yield from of_arms(entry("studies/jumbo_rates"))


@PAGE.table("512 clusters | best rate | test accuracy | training loss | over registers (standard error)")
def jumbo_clusters():
    yield from of_arms(entry("studies/jumbo_rates", "clusters"))


def of_arms(found):
    """A row for each arm of `jumbo_rates`."""
    for row in found["rows"]:
        cells = [f"{row['rate']:g}", spread(row["top1"]), f"{statistics.fmean(row['loss']):.3f}"]
        gain = found["gains"].get(f"{row['arm']} - registers, {row['width']}")
        more = f"{100 * gain['gap']:+.1f} ({100 * gain['standard_error']:.1f})" if gain else ""
        yield [row["arm"], *cells, more]


@PAGE.table("model | images/s | step, ms | equal epochs | equal time (epochs)")
def jumbo_baselines():
    names = dict(jumbo="Jumbo", registers="registers", mobilenetv4="MobileNetV4 conv-small", shvit="SHViT S1")
    names |= dict(efficientvit="EfficientViT-B0", bixt="BiXT")
    for model, row in entry("studies/jumbo_baselines")["rows"].items():
        equal = f"{spread(row['equal time'])} ({row['equal time, epochs']:.2f})"
        numbers = [f"{row['speed']:,.0f}", f"{1e3 * row['step_seconds']:.0f}", spread(row["equal epochs"])]
        yield [names[model], *numbers, "the same (2.00)" if model == "jumbo" else equal]


@PAGE.table("15 corruptions, severity 5 | clean | corrupted | with SAR | SAR's gain (standard error) | confident")
def corruptions():
    found = entry("studies/jumbo_sar")
    for kind, results in found["runs"].items():
        corrupted = [rows for name, rows in results.items() if name != "clean"]

        def mean(key, corrupted=corrupted):
            return [statistics.fmean(rows[seed][key] for rows in corrupted) for seed in range(len(found["seeds"]))]

        gain = found["gains"][f"{kind}+SAR - {kind}"]
        cells = [[row["unadapted_top1"] for row in results["clean"]], mean("unadapted_top1"), mean("top1")]
        change = f"{100 * gain['gap']:+.2f} ({100 * gain['standard_error']:.2f})"
        yield [kind, *map(spread, cells), change, f"{100 * statistics.fmean(mean('kept')):.0f} %"]


SERIES = "rank: plain | registers | Jumbo | accuracy: plain | registers | Jumbo | Jumbo - plain | Jumbo - registers"


@PAGE.table(f"fourteen sets, one seed | {SERIES}")
def series():
    names = {"best": "best run", "mean": "mean of the runs"}
    paper = timeseries.paper()
    for row in entry("studies/jumbo_time_series")["rows"]:
        name, (ranks,) = names[row["kind"]], row["ranks"].values()
        yield [name, *(f"{rank:.2f}" for rank in ranks), *map(spread, row["accuracy"].values()), *gains(row["gains"])]
        means = map(statistics.fmean, zip(*paper["univariate", row["kind"], 8].values(), strict=True))
        cells = [*map(str, jumbo_time_series.PAPER[row["kind"]]), *(f"{mean:.1f}" for mean in means)]
        yield [f"{name}, paper", *cells, *gains(row["paper"])]


def gains(of: dict) -> list[str]:
    return [f"{100 * gain['gap']:+.2f} ± {100 * gain['standard_error']:.2f}" for gain in of.values()]


def sentences():
    yield from series_sentences()
    yield from corruption_sentences()
    pair = "equal epochs: jumbo - registers"
    yield f"Jumbo is {gap('jumbo_baselines', pair)} points ahead of registers (standard error "
    yield f"{error('jumbo_baselines', pair)}), {verdict('jumbo_baselines', pair)}"
    behind, ahead = (f"equal time: jumbo - {model}" for model in ("mobilenetv4", "efficientvit"))
    assert {verdict("jumbo_baselines", pair) for pair in (behind, ahead)} == {"not resolved"}
    points = [gap("jumbo_baselines", pair) for pair in (behind, ahead)]
    yield "that MobileNetV4 is {} points behind Jumbo and EfficientViT {} ahead is not resolved".format(*points)
    pairs = ("Jumbo, rate / J - registers, 48", "Jumbo, rate / J - Jumbo, 48", "no MLP - registers, 48")
    own, one, wide = (gap("jumbo_rates", pair) for pair in pairs)
    widths = {width: gap("jumbo_rates", f"Jumbo - registers, {width}", key) for width, key in XAVIER.items()}
    yield "with Xavier's it is {} points ahead at one rate, too, {} at width 96 and {} at 192".format(*widths.values())
    yield f"for its MLP, Jumbo is {own} points above registers at equal time, and {one} above Jumbo at one rate"
    yield f"without an MLP of its own the token has {wide} points"
    own, one, wide = (gap("jumbo_rates", pair, "clusters") for pair in pairs)
    first, second = (verdict("jumbo_rates", pair, "clusters") for pair in pairs[:2])
    yield f"So tuned, Jumbo is {own} points above registers, {first}, and {one} above Jumbo at one rate, {second}"
    octic = entry("studies/jumbo_small_images", "octic")["rows"]
    values = [
        spread(octic[f"{model} 96"]["eval/accuracy/top1"]["values"]) for model in ("octic", "invariant", "steerable")
    ]
    yield "has {}, with an invariant Jumbo token {}, with a steerable one {}".format(*values)


def series_sentences():
    found = entry("studies/jumbo_time_series")
    sweeps = {(sweep["data"], sweep["model"]): sweep for sweep in found["sweeps"].values()}
    rates = [(sweep["best"]["lr"], [run["lr"] for run in sweep["runs"]]) for sweep in sweeps.values()]
    edges = sum(best in (min(grid), max(grid)) for best, grid in rates)
    yield f"In {edges} of {len(rates)} sweeps the best rate lies at the edge"
    yield f"{len(rates)} sweeps, {sum(sweep['seconds'] for sweep in sweeps.values()) / 3600:.1f} core-hours"
    best, mean = (row["gains"] for row in found["rows"])
    assert not any(map(differences.resolved, (*best.values(), *mean.values())))
    ours, papers = mean["Jumbo - plain"]["standard_error"], found["rows"][1]["paper"]["Jumbo - plain"]["gap"]
    assert special.stdtrit(len(found["rows"][1]["sets"]) - 1, 1 - differences.LEVEL / 2) * ours < papers
    yield f"{100 * papers:.1f} points over plain in the mean of the runs, as in the paper, would be resolved"
    yield f"would be resolved: the standard error here is {100 * ours:.1f}"
    own = found["rows"][0]["paper"]["Jumbo - plain"]
    assert not differences.resolved(own)
    yield f"the paper's own gain over plain, {100 * own['gap']:.1f} points, is not resolved"
    others = [_without_adiac(sweeps, kind) for kind in timeseries.KINDS]
    yield "it is {:.1f} points ahead with the best run and {:.1f} in the mean of the runs".format(*others)
    yield from _sets_of_the_paper({pair: 100 * sweep["best"]["test"] for pair, sweep in sweeps.items()})
    (twice,) = entry("studies/jumbo_time_series", "twice")["sweeps"].values()
    (run,) = twice["runs"]
    (once,) = (r for r in sweeps["Adiac", "patchtst"]["runs"] if r["lr"] == run["lr"])
    yield f"plain has {100 * run['test']:.1f} % there, at a rate of {run['lr']:g}, and not {100 * once['test']:.1f}"
    yield f"though its held-out loss is {run['validation_loss']:.2f} and not {once['validation_loss']:.2f}"
    (saturated,) = entry("studies/jumbo_time_series", "basic_motions")["sweeps"].values()
    assert [run["test"] for run in saturated["runs"]] == [1.0] * 4
    _row_of_results(found["rows"])


def _without_adiac(sweeps: dict, kind: str) -> float:
    """Jumbo's lead over plain on the other sets, in points."""
    sets = timeseries.accuracies(list(sweeps.values()))["univariate", kind, 8]
    return statistics.fmean(jumbo - plain for name, (plain, _, jumbo) in sets.items() if name != "Adiac")


def _sets_of_the_paper(tests: dict):
    """Accuracies of three sets beside the paper's."""
    paper = timeseries.paper()["univariate", "best", 8]
    gaps = {
        name: sorted(tests[name, m] - p for m, p in zip(timeseries.MODELS, paper[name], strict=True)) for name in SETS
    }
    crop, pedestrian = gaps["Crop"], gaps["MelbournePedestrian"]
    yield f"On Crop the three models are {-crop[-1]:.1f} to {-crop[0]:.1f} points below the paper"
    yield f"on MelbournePedestrian {pedestrian[0]:.1f} to {pedestrian[-1]:.1f} above it"
    devices = [value for (data, _), value in tests.items() if data == "ElectricDevices"]
    yield f"On ElectricDevices they reach {min(devices):.1f} to {max(devices):.1f} %"


def _row_of_results(rows: list[dict]):
    """Check the row about time series in docs/results.md."""
    text = (ROOT / "docs/results.md").read_text()
    ranks = [next(iter(row["ranks"].values())) for row in rows]
    (plain, registers, jumbo), mean = ranks
    assert plain == jumbo < registers and mean[1] < mean[0] < mean[2]
    assert f"plain and Jumbo share the best mean rank of the best run, {jumbo:.2f}" in text
    assert f"in the mean of the runs registers have it, {mean[1]:.2f}, and Jumbo {mean[2]:.2f}" in text
    of_all = [gain for row in rows for gain in row["gains"].values()]
    points, spreads = ([100 * gain[key] for gain in of_all] for key in ("gap", "standard_error"))
    assert f"Jumbo is {min(points):.1f} to {max(points):.1f} points ahead" in text
    assert f"standard errors of {min(spreads):.1f} to {max(spreads):.1f} points over the sets" in text


def corruption_sentences():
    for pair, said in (("Jumbo - Registers", "without SAR"), ("Jumbo+SAR - Registers+SAR", "with it")):
        yield f"{gap('jumbo_sar', pair)} points {said} (standard error {error('jumbo_sar', pair)})"
    faster = [gap("jumbo_sar", f"{kind}+SAR - {kind}", "faster") for kind in ("Registers", "Jumbo")]
    yield "it takes {} points from registers and {} from Jumbo".format(*faster)
    found = entry("studies/jumbo_sar")
    kinds = {kind: verdict("jumbo_sar", f"{kind}+SAR - {kind}") for kind in ("Registers", "Jumbo")}
    assert kinds == {"Registers": "not resolved", "Jumbo": "resolved"}
    for gains in (found["gains"], entry("studies/jumbo_sar", "faster")["gains"]):
        assert all(gains[f"{kind}+SAR - {kind}"]["gap"] < 0 for kind in ("Registers", "Jumbo"))
    paper = {row: statistics.fmean(values) for row, values in found["paper"].items()}
    alone, adapted = (paper[f"Jumbo{form}"] - paper[f"Registers{form}"] for form in ("", "+SAR"))
    yield f"Jumbo is {alone:.1f} points ahead without SAR and {adapted:.1f} with it"
    brings = (paper[f"{kind}+SAR"] - paper[kind] for kind in ("Registers", "Jumbo"))
    yield "and SAR itself brings {:.0f} to {:.0f}".format(*brings)
