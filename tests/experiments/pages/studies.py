"""Figures of experiments/studies/README.md."""

import statistics

from experiments.studies import several_seeds
from tests.experiments.pages.figures import Page, constant, entry, error, gap, spread

PAGE = Page("studies/README")
PROBE = "linear_probe/top1"
XAVIER = {48: "xavier", 96: "xavier_96", 192: "xavier_192"}  # entries of `jumbo_rates` by width


@PAGE.table("digits | upright | mean of eight orientations | never changes", "digits")
@PAGE.table("CIFAR-10 | upright | mean of eight orientations | never changes", "cifar10")
@PAGE.table("blood cells | upright | mean of eight orientations | never changes", "blood_cells")
def octic_small_images(data: str):
    rows = entry("studies/octic_small_images", data)["rows"]
    for family in ("plain", "H8", "I8", "D8"):
        row = {key: value.get("values") for key, value in rows[family].items() if isinstance(value, dict)}
        never = statistics.fmean(row["eval/orientation/consistency"])
        figures = [row["eval/accuracy/top1"], row["eval/orientation/accuracy_mean"]]
        yield [family, *map(spread, figures), f"{100 * never:.0f} %"]


@PAGE.table("equal | model | width | M multiply-adds | step over plain's | upright | eight orientations")
def equal_compute():
    sets = [("blood cells", "blood_cells", "main"), ("CIFAR-10, 2,500 steps", "cifar10", "cifar10")]
    for title, data, key in sets:
        for rule in (None, "multiply-adds", "step time"):
            for row in entry("studies/octic_equal_compute", key)["rows"]:
                if (row["data"], row["rule"]) == (data, rule):
                    label = {None: title, "multiply-adds": "equal multiply-adds"}.get(rule, "equal step time")
                    ratio = "1" if rule is None else f"{row['time_ratio']:.2f}"
                    numbers = [str(row["width"]), f"{row['macs'] / 1e6:.2f}", ratio]
                    yield [label, row["family"], *numbers, spread(row["upright"]), spread(row["eight"])]


@PAGE.table("blood cells, 24 angles | upright | between | worst angle | best angle | same")
def octic_angles():
    for arm, row in entry("studies/octic_angles", "blood_cells")["rows"].items():
        yield [arm, *(spread(row[key]) for key in ("upright", "between", "worst", "best", "same"))]


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


@PAGE.table("backbone, decoder | mean IoU | mASCC | mean IoU of eight | same in eight")
def camvid():
    names = dict(plain="plain ViT, linear", D8="D8 ViT, linear", swin="Swin, UperNet")
    names |= {"adaptive": "adaptive Swin, equivariant UperNet", "adaptive unpool": "... with unpooling"}
    for name, row in entry("studies/segmentation_camvid")["rows"].items():
        cells = [spread(row["miou"]), constant(row["mascc"]), spread(row["eight"]), constant(row["same"])]
        yield [names[name], *cells]


@PAGE.table(
    "blood cells | probe at start | probe | k-NN at start | k-NN | k-NN, eight | same in eight | entropies",
    "blood_cells",
)
@PAGE.table(
    "CIFAR-10 | probe at start | probe | k-NN at start | k-NN | k-NN, eight | same in eight | entropies",
    "cifar10",
)
def dinov2(data: str):
    rows = entry("studies/dinov2_small_images", data)["rows"]
    for family in ("plain", "H8", "I8"):
        row = rows[family]
        keys = ("start linear_probe/top1", "linear_probe/top1", "start knn/top1", "knn/top1", "knn/accuracy_mean")
        cells = [spread(row[key]) for key in keys] + [constant(row["knn/consistency"])]
        entropies = (100 * statistics.fmean(row[f"classes/{key}"]) for key in ("rows", "mean"))
        yield [family, *cells, ", ".join(f"{value:.0f}" if value < 99.45 else f"{value:.1f}" for value in entropies)]


@PAGE.table("MAE, blood cells | probe at start | probe | k-NN at start | k-NN | explained | turned")
def autoencoders():
    for family, row in entry("studies/mae_small_images")["rows"].items():
        keys = (
            "start linear_probe/top1",
            "linear_probe/top1",
            "start knn/top1",
            "knn/top1",
            "reconstruction/explained",
        )
        yield [family, *(spread(row[key]) for key in keys), f"{max(row['turned']):.0e}"]


@PAGE.table("MAE and Jumbo | best rate | probe | 20 nearest | explained | probe over plain (standard error)")
def autoencoders_with_jumbo():
    found = entry("studies/jumbo_mae")
    for arm, row in found["rows"].items():
        gain = found["gains"].get(f"{arm} - plain, probe")
        over = f"{100 * gain['gap']:+.1f} ({100 * gain['standard_error']:.1f})" if gain else ""
        yield [arm, f"{row['rate']:g}", *(spread(row[key]) for key in ("probe", "nearest", "explained")), over]


@PAGE.table(
    "variant | rank: plain | registers | Jumbo | accuracy: plain | registers | Jumbo | Jumbo - plain "
    "| Jumbo - registers",
)
def public_series():
    names = {"best": "best run", "mean": "mean of the runs"}
    for row in entry("studies/timeseries_public")["rows"]:
        ranks = [statistics.fmean(values) for values in zip(*row["ranks"].values(), strict=True)]
        cells = [f"{rank:.2f}" for rank in ranks] + [spread(values) for values in row["accuracy"].values()]
        for gain in row["gains"].values():
            cells.append(f"{100 * gain['gap']:+.2f} ± {100 * gain['standard_error']:.2f}")
        yield [f"{row['variant']}, {names[row['kind']]}", *cells]


@PAGE.table("option | plain: loss | gradient | step | I8: loss | gradient | step")
def quirks():
    found = {
        family: {r["option"]: r for r in rows} for family, rows in entry("studies/dinov2_quirks")["families"].items()
    }
    for option in dict.fromkeys(option for rows in found.values() for option in rows):
        cells = []
        for rows in found.values():
            row = rows.get(option)
            change = f"{row['change']:.2g}" if row and row["change"] else "0"
            cells += [f"{row['loss']:.3f}", f"{row['gradient']:.1f}", change] if row else ["", "", ""]
        yield [option, *cells]


def sentences():
    name, pairs = "segmentation_camvid", ("D8 - plain, miou", "D8 - plain, eight", "adaptive - swin, miou")
    yield f"D8 is {gap(name, pairs[0])} points below plain (standard error {error(name, pairs[0])}, not resolved)"
    yield f"and {gap(name, pairs[1])} above it over the eight orientations"
    yield f"The adaptive Swin is {gap(name, pairs[2])} points ({error(name, pairs[2])}) below the ordinary one"
    angles = (
        ("octic_angles", "I8 - plain, between", "blood_cells"),
        ("octic_angles", "D8 - plain, between", "blood_cells"),
    )
    yield "I8 is {} points above plain (standard error {}) and D8 {} ({})".format(
        *(figure(*pair) for pair in angles for figure in (gap, error))
    )
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
    for data in ("blood_cells", "cifar10"):
        yield f"{100 * entry('studies/dinov2_small_images', data)['pixels']:.1f}"
    probes = {key: entry("studies/mae_small_images", key)["rows"]["plain"] for key in ("main", "normal")}
    gains = {key: several_seeds.difference(row[PROBE], row[f"start {PROBE}"])["gap"] for key, row in probes.items()}
    yield f"a plain model gains {100 * gains['normal']:.0f} points, not {100 * gains['main']:.0f}"
    mae = {family: row[PROBE] for family, row in entry("studies/mae_small_images")["rows"].items()}
    gain = several_seeds.difference(mae["D8"], mae["plain"])
    yield f"D8 is {-100 * gain['gap']:.1f} points below (standard error {100 * gain['standard_error']:.1f})"
    name = "octic_equal_compute"
    for data, key, model in (("blood_cells", "main", "I8"), ("cifar10", "cifar10", "H8")):
        yield f"{gap(name, f'{data}, upright: {model}, equal step time, minus plain', key)} "


def series_sentences():
    sweeps = entry("studies/timeseries_public")["sweeps"].values()
    rates = [(sweep["best"]["lr"], [run["lr"] for run in sweep["runs"]]) for sweep in sweeps]
    edges = sum(best in (min(grid), max(grid)) for best, grid in rates)
    yield f"In {edges} of {len(rates)} sweeps the best rate lies at the edge"
    tests = {(sweep["data"], sweep["model"]): 100 * sweep["best"]["test"] for sweep in sweeps}
    adiac = (tests["Adiac", f"patchtst{kind}"] for kind in ("", "_registers", "_jumbo"))
    yield "plain {:.1f}, registers {:.1f}, Jumbo {:.1f}".format(*adiac)
    devices = [value for (data, _), value in tests.items() if data == "ElectricDevices"]
    yield f"On ElectricDevices they reach {min(devices):.0f} to {max(devices):.0f} %"
    losses = [run["test_loss"] for sweep in sweeps if sweep["data"] == "ElectricDevices" for run in sweep["runs"]]
    yield f"Test losses there are {min(losses):.1f} to {max(losses):.1f}"


def corruption_sentences():
    runs = entry("studies/jumbo_sar")["runs"]

    def mean(kind, key):
        return statistics.fmean(found[key] for name, (found,) in runs[kind].items() if name != "clean")

    plain = {kind: 100 * mean(kind, "unadapted_top1") for kind in runs}
    yield f"Jumbo has {plain['Jumbo']:.1f} % in the mean and registers {plain['Registers']:.1f}"
    clean = (100 * runs[kind]["clean"][0]["unadapted_top1"] for kind in ("Jumbo", "Registers"))
    yield "on clean images they have {:.1f} and {:.1f}".format(*clean)
    assert all(abs(100 * mean(kind, "top1") - plain[kind]) < 0.1 for kind in runs)
    yield "SAR changes neither mean by more than 0.1 points"
    yield f"Jumbo is confident about {100 * mean('Jumbo', 'kept'):.0f} % of the images and registers about none"
