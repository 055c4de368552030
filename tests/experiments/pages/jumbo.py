"""Figures of experiments/studies/jumbo.md."""

import statistics

from tests.experiments.pages.figures import ROOT, Page, entry, error, gap, spread

PAGE = Page("studies/jumbo")
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


@PAGE.table(f"eleven sets, one seed | {SERIES}", "main")
@PAGE.table(f"eight sets, two seeds | {SERIES}", "two_seeds")
def series(key: str):
    names = {"best": "best run", "mean": "mean of the runs"}
    for row in entry("studies/jumbo_time_series", key)["rows"]:
        ranks = [statistics.fmean(values) for values in zip(*row["ranks"].values(), strict=True)]
        cells = [f"{rank:.2f}" for rank in ranks] + [spread(values) for values in row["accuracy"].values()]
        for gain in row["gains"].values():
            cells.append(f"{100 * gain['gap']:+.2f} ± {100 * gain['standard_error']:.2f}")
        yield [names[row["kind"]], *cells]


def sentences():
    yield from series_sentences()
    yield from corruption_sentences()
    pair = "equal epochs: jumbo - registers"
    yield f"Jumbo is {gap('jumbo_baselines', pair)} points ahead of registers (standard error "
    yield f"{error('jumbo_baselines', pair)}), not resolved"
    yield f"{gap('jumbo_baselines', 'equal time: jumbo - mobilenetv4')} points behind Jumbo, resolved"
    pairs = ("Jumbo, rate / J - registers, 48", "Jumbo, rate / J - Jumbo, 48", "no MLP - registers, 48")
    own, one, wide = (gap("jumbo_rates", pair) for pair in pairs)
    widths = {width: gap("jumbo_rates", f"Jumbo - registers, {width}", key) for width, key in XAVIER.items()}
    yield "with Xavier's it is {} points ahead at one rate, too, {} at width 96 and {} at 192".format(*widths.values())
    yield f"Jumbo at its own rate is {own} points above registers at equal time, and {one} above Jumbo at one rate"
    yield f"without an MLP of its own the token has {wide} points"
    own, one, wide = (gap("jumbo_rates", pair, "clusters") for pair in pairs)
    yield f"Jumbo at its own rate is {own} points above registers, and {one} above Jumbo at one rate"
    octic = entry("studies/jumbo_small_images", "octic")["rows"]
    values = [
        spread(octic[f"{model} 96"]["eval/accuracy/top1"]["values"]) for model in ("octic", "invariant", "steerable")
    ]
    yield "has {}, with an invariant Jumbo token {}, with a steerable one {}".format(*values)


def series_sentences():
    sweeps = entry("studies/jumbo_time_series")["sweeps"].values()
    rates = [(sweep["best"]["lr"], [run["lr"] for run in sweep["runs"]]) for sweep in sweeps]
    edges = sum(best in (min(grid), max(grid)) for best, grid in rates)
    yield f"In {edges} of {len(rates)} sweeps the best rate lies at the edge"
    yield from _beyond_the_edges()
    tests = {(sweep["data"], sweep["model"]): 100 * sweep["best"]["test"] for sweep in sweeps}
    adiac = (tests["Adiac", f"patchtst{kind}"] for kind in ("", "_registers", "_jumbo"))
    yield "plain {:.1f}, registers {:.1f}, Jumbo {:.1f}".format(*adiac)
    yield from _second_seed()
    devices = [value for (data, _), value in tests.items() if data == "ElectricDevices"]
    yield f"On ElectricDevices they reach {min(devices):.0f} to {max(devices):.0f} %"
    losses = [run["test_loss"] for sweep in sweeps if sweep["data"] == "ElectricDevices" for run in sweep["runs"]]
    yield f"Test losses there are {min(losses):.1f} to {max(losses):.1f}"


def _second_seed():
    """The sweeps of the second seed, and what does not repeat with it."""
    found = entry("studies/jumbo_time_series", "two_seeds")
    sweeps = {
        (sweep["data"], sweep["model"]): sweep for name, sweep in found["sweeps"].items() if name.startswith("seed_1/")
    }
    adiac = (100 * sweeps["Adiac", f"patchtst{kind}"]["best"]["test"] for kind in ("", "_registers", "_jumbo"))
    yield "Adiac has {:.1f} with plain, {:.1f} with registers and {:.1f} with Jumbo".format(*adiac)
    assert all(run["test"] > 0.85 for run in sweeps["ItalyPowerDemand", "patchtst_jumbo"]["runs"])
    rates = [(sweep["best"]["lr"], [run["lr"] for run in sweep["runs"]]) for sweep in sweeps.values()]
    edges = sum(best in (min(grid), max(grid)) for best, grid in rates)
    yield f"In {edges} of the second seed's {len(rates)} sweeps the best rate lies at the edge"
    gains = [gain for row in found["rows"] for gain in row["gains"].values()]
    assert all(abs(gain["gap"]) < 2 * gain["standard_error"] for gain in gains)
    errors = [100 * gain["standard_error"] for gain in gains]
    first, second = (100 * found["sweeps"][f"seed_{k}/Adiac-patchtst_registers-8"]["best"]["test"] for k in (0, 1))
    results = (ROOT / "docs/results.md").read_text()
    assert f"standard errors of {min(errors):.1f} to {max(errors):.1f} points over the eight sets" in results
    assert f"registers gain {second - first:.0f} points with the second seed" in results


def _beyond_the_edges():
    """Compare sweeps whose best rate lies at an edge with one rate beyond it."""
    grid = entry("studies/jumbo_time_series")["sweeps"]
    gains = {}
    for key, edge in (("lower", min), ("higher", max)):
        for name, sweep in entry("studies/jumbo_time_series", key)["sweeps"].items():
            best, beyond = grid[name]["best"], sweep["best"]
            if best["lr"] == edge(run["lr"] for run in grid[name]["runs"]):
                better = beyond["validation"] > best["validation"]
                gains[sweep["data"], sweep["model"]] = 100 * (beyond["test"] - best["test"]) if better else None
    better = {pair: gain for pair, gain in gains.items() if gain is not None}
    yield f"worse on held-out series in {len(gains) - len(better)} of the {len(gains)}"
    ((data, model), gain) = better.popitem()
    sets = entry("studies/jumbo_time_series")["rows"][0]["sets"]
    assert not better and model == "patchtst_jumbo"
    yield f"Jumbo on {data} gains {gain:.1f} points with it, which would add {gain / len(sets):.2f} to its mean"
    jumbo = entry("studies/jumbo_time_series", "higher")["sweeps"]["seed_0/ItalyPowerDemand-patchtst_jumbo-8"]["best"]
    yield f"at a rate of 0.03 it has {100 * jumbo['test']:.1f} %"


def corruption_sentences():
    for pair, said in (("Jumbo - Registers", "without SAR"), ("Jumbo+SAR - Registers+SAR", "with it")):
        yield f"{gap('jumbo_sar', pair)} points {said} (standard error {error('jumbo_sar', pair)})"
    faster = [gap("jumbo_sar", f"{kind}+SAR - {kind}", "faster") for kind in ("Registers", "Jumbo")]
    yield "it takes {} points from registers and {} from Jumbo".format(*faster)
    found = entry("studies/jumbo_sar")
    for gains in (found["gains"], entry("studies/jumbo_sar", "faster")["gains"]):
        assert all(gains[f"{kind}+SAR - {kind}"]["gap"] < 0 for kind in ("Registers", "Jumbo"))
    paper = {row: statistics.fmean(values) for row, values in found["paper"].items()}
    alone, adapted = (paper[f"Jumbo{form}"] - paper[f"Registers{form}"] for form in ("", "+SAR"))
    yield f"Jumbo is {alone:.1f} points ahead without SAR and {adapted:.1f} with it"
    brings = (paper[f"{kind}+SAR"] - paper[kind] for kind in ("Registers", "Jumbo"))
    yield "and SAR itself brings {:.0f} to {:.0f}".format(*brings)
