"""Figures of experiments/studies/README.md."""

import statistics

from experiments.studies import differences
from tests.experiments.pages.figures import Page, constant, entry, error, gap, spread, verdict

PAGE = Page("studies/README")
PROBE = "linear_probe/top1"


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


def dinov2_sentences():
    def both(gain, data):
        return gap(name, gain, data), error(name, gain, data)

    name, probe = "dinov2_small_images", "linear_probe/top1"
    ahead, nearest, added = (f"I8 - plain, {what}" for what in (probe, "knn/top1", f"added to {probe}"))
    for data in ("blood_cells", "cifar10"):
        found = entry(f"studies/{name}", data)
        yield f"{100 * found['pixels']:.1f}"
        assert all(verdict(name, gain, data) == "resolved" for gain in found["gains"] if "its start" in gain)
        assert {verdict(name, gain, data) for gain in (ahead, added)} == {"resolved"}
        assert found["gains"][ahead]["gap"] > 0 > found["gains"][added]["gap"]
    points = "I8 is ahead of plain by {} points of the probe (standard error {})"
    cells, cifar10 = both(ahead, "blood_cells"), both(ahead, "cifar10")
    yield f"{points} and {{}} of k-NN ({{}})".format(*cells, *both(nearest, "blood_cells"))
    yield f"ahead by {gap(name, f'I8 - plain, start {probe}', 'blood_cells')} points of the probe: training adds "
    yield "training adds {} points less to it ({}), resolved".format(*both(added, "blood_cells"))
    yield "I8 is ahead by {} points ({}) with six seeds".format(*both(ahead, "blood_cells_xavier_six"))
    behind, less = f"H8 - plain, {probe}", f"H8 - plain, added to {probe}"
    yield f"{points}, H8 behind by {{}} ({{}}, not resolved)".format(*cifar10, *both(behind, "cifar10"))
    assert (verdict(name, behind, "cifar10"), verdict(name, less, "cifar10")) == ("not resolved", "resolved")
    yield "adds {} points less to I8's probe than to plain's ({})".format(*both(added, "cifar10"))
    yield "and {} less to H8's ({}), both resolved".format(*both(less, "cifar10"))


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
    yield from dinov2_sentences()
    probes = {key: entry("studies/mae_small_images", key)["rows"]["plain"] for key in ("main", "normal")}
    gains = {key: differences.difference(row[PROBE], row[f"start {PROBE}"])["gap"] for key, row in probes.items()}
    yield f"a plain model gains {100 * gains['normal']:.0f} points, not {100 * gains['main']:.0f}"
    mae = {family: row[PROBE] for family, row in entry("studies/mae_small_images")["rows"].items()}
    name, pairs = "mae_small_images", {family: f"{family} - plain, {PROBE}" for family in ("H8", "I8", "D8")}
    assert {verdict(name, pair) for pair in pairs.values()} == {"not resolved"}
    yield f"D8 is {gap(name, pairs['D8'])} points below (standard error {error(name, pairs['D8'])})"
    starts = {family: f"{family} - its start, {PROBE}" for family in mae}
    assert [family for family, pair in starts.items() if verdict(name, pair) == "resolved"] == ["plain", "H8", "I8"]
    yield f"the probe gains {float(gap(name, starts['I8'])):.0f} to {float(gap(name, starts['plain'])):.0f} points"
    found = entry("studies/jumbo_mae")
    plain, jumbo = (found["rows"][arm]["probe"] for arm in ("plain", "Jumbo, rate / J"))
    for points, resolved in ((2.9, False), (3.0, True)):  # were Jumbo ahead by so much, with these spreads
        more = points / 100 + statistics.fmean(plain) - statistics.fmean(jumbo)
        assert differences.resolved(differences.difference([one + more for one in jumbo], plain)) == resolved
    yield "for Jumbo with a J-th of the rate 2.9 points, where the paper's gain is 4.9"
    name, pair = "jumbo_mae", "Jumbo, rate / J - plain, explained"
    more = f"explains {gap(name, pair)} points more of the removed patches than plain"
    yield f"{more} (standard error {error(name, pair)})"
    assert found["gains"][pair]["gap"] > 0
    assert all(min(found["rates"]) < row["rate"] < max(found["rates"]) for row in found["rows"].values())
    name = "octic_equal_compute"
    for data, key, model in (("blood_cells", "main", "I8"), ("cifar10", "cifar10", "H8")):
        yield f"{gap(name, f'{data}, upright: {model}, equal step time, minus plain', key)} "
