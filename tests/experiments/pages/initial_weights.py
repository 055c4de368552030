"""Figures of experiments/studies/initial_weights.md."""

import itertools
import math
import statistics

from scipy import special

from experiments.studies import differences
from tests.experiments.pages import jumbo, studies
from tests.experiments.pages.figures import Page, entry, error, gap, least_of_six, rows_by, spread, verdict

PAGE = Page("studies/initial_weights")
EQUAL, DINOV2, KNN = "studies/octic_equal_compute", "studies/dinov2_small_images", "knn/top1"


COLUMNS = "width | best rate | upright | eight orientations | over plain, upright (standard error)"


@PAGE.table(f"blood cells, Xavier | {COLUMNS}", "blood_cells", "xavier")
@PAGE.table(f"CIFAR-10, 2,500 steps, Xavier | {COLUMNS}", "cifar10", "cifar10_xavier")
@PAGE.table(f"patterns, Xavier | {COLUMNS}", "patterns", "patterns")
def equal_compute_from_xavier(data: str, key: str):
    found = entry(EQUAL, key)
    for row in found["rows"]:
        gain = found["gains"].get(f"{data}, upright: {row['model']}, minus plain")
        over = f"{100 * gain['gap']:+.1f} ({100 * gain['standard_error']:.1f})" if gain else ""
        cells = [str(row["width"]), f"{row['rate']:g}", spread(row["upright"]), spread(row["eight"])]
        yield [row["family"], *cells, over]


@PAGE.table("width 48, Xavier | best rate | test accuracy | training loss | over registers (standard error)")
def jumbo_from_xavier():
    yield from jumbo.of_arms(entry("studies/jumbo_rates", "xavier"))


@PAGE.table("width 96, Xavier | best rate | test accuracy | training loss | over registers (standard error)")
def jumbo_of_width_96():
    yield from jumbo.of_arms(entry("studies/jumbo_rates", "xavier_96"))


@PAGE.table("width 192, Xavier | best rate | test accuracy | training loss | over registers (standard error)")
def jumbo_of_width_192():
    yield from jumbo.of_arms(entry("studies/jumbo_rates", "xavier_192"))


@PAGE.table("512 clusters, Xavier | best rate | test accuracy | training loss | over registers (standard error)")
def clusters_from_xavier():
    yield from jumbo.of_arms(entry("studies/jumbo_rates", "clusters_xavier"))


@PAGE.table("blood cells, DINOv2, Xavier, six seeds | probe at start | probe | k-NN at start | k-NN")
def dinov2_from_xavier():
    for family, row in entry(DINOV2, "blood_cells_xavier_six")["rows"].items():
        figures = ("start linear_probe/top1", "linear_probe/top1", "start knn/top1", "knn/top1")
        yield [family, *(spread(row[figure]) for figure in figures)]


def sentences():
    rows = {
        key: {row["family"]: row["upright"] for row in entry(EQUAL, key)["rows"] if chosen(row)}
        for key in ("main", "xavier")
    }
    mean = {key: {family: 100 * statistics.fmean(row) for family, row in of.items()} for key, of in rows.items()}
    gained = [f"{mean['xavier'][family] - mean['main'][family]:.1f}" for family in ("plain", "H8", "I8", "D8")]
    yield "plain gains {} points upright, H8 {}, I8 {} and D8 {}".format(*gained)
    before, after = (mean[key]["H8"] - mean[key]["plain"] for key in ("main", "xavier"))
    yield f"Jumbo at one rate was {gap('jumbo_rates', 'Jumbo - registers, 48')} points above registers, not resolved"
    yield f"and {gap('jumbo_rates', 'Jumbo, rate / J - Jumbo, 48')} below Jumbo with a J-th of the rate for its MLP"
    probes = {key: entry("studies/mae_small_images", key)["rows"]["plain"] for key in ("normal", "main")}
    gains = [differences.difference(row[studies.PROBE], row[f"start {studies.PROBE}"]) for row in probes.values()]
    yield "a plain model's probe gains {:.0f} points, with Xavier's {:.0f}".format(*(100 * one["gap"] for one in gains))
    arms = {row["arm"]: row["top1"] for row in entry("studies/jumbo_rates", "xavier")["rows"]}
    gain = differences.difference(arms["Jumbo"], arms["no MLP"])
    wide = gap("jumbo_rates", "no MLP - registers, 48", "xavier")
    assert not differences.resolved(gain)
    mlp = f"{100 * gain['gap']:.1f} more (standard error {100 * gain['standard_error']:.1f}, not resolved)"
    yield f"The wider input of the classifier brings {wide} points, and the MLP {mlp}"
    gains = [entry("studies/jumbo_rates", key)["gains"][f"Jumbo - registers, {w}"] for w, key in jumbo.XAVIER.items()]
    ahead = [f"{100 * gain['gap']:.1f}" for gain in gains]
    yield "Jumbo is {} points ahead at width 48, {} at 96 and {} at 192".format(*ahead)
    for narrow, wide in itertools.pairwise(gains):
        both = 100 * math.hypot(narrow["standard_error"], wide["standard_error"])
        fall = 100 * (narrow["gap"] - wide["gap"])
        assert fall > special.stdtrit(6, 1 - differences.LEVEL / 2) * both  # Welch: six degrees or more
        yield f"by {fall:.1f} points (standard error {both:.1f})"
    yield "; both are resolved"
    steps = [row["steps"] for row in entry("studies/jumbo_rates", "xavier_192")["rows"]]
    yield "registers take {:,} steps in the time of Jumbo's {:,}".format(*steps)
    shares = [share_of_registers(key) for key in ("clusters_xavier", "xavier")]
    yield "ahead by {:.0f} % of registers' accuracy, and by {:.0f} % with ten classes".format(*shares)
    arms = {row["arm"]: row["top1"] for row in entry("studies/jumbo_rates", "clusters_xavier")["rows"]}
    gain = differences.difference(arms["no MLP"], arms["Jumbo"])
    more = f"{100 * gain['gap']:.1f} points more (standard error {100 * gain['standard_error']:.1f})"
    yield f"not resolved: without one the token has {more}"
    yield from baselines()
    yield from six_seeds_sentences()
    yield from registers_sentences()
    yield from cifar10_sentences()
    yield from pattern_sentences()
    yield from dinov2_sentences()
    yield f"H8's lead of {before:.1f} points shrinks to {after:.1f}"


def six_seeds_sentences():
    found = {row["family"]: row for row in entry(EQUAL, "xavier_six")["rows"]}
    pair = "octic_equal_compute", "blood_cells, upright: H8, equal multiply-adds, minus plain", "xavier_six"
    plain, octic = (spread(found[family]["upright"]) for family in ("plain", "H8"))
    yield f"Plain, at {found['plain']['rate']:g}, then has {plain} and H8 {octic}, {gap(*pair)} points above "
    yield f"(standard error {error(*pair)}), {verdict(*pair)}"
    grid = entry(EQUAL, "xavier_six")["rates"]
    assert all(min(grid) < row["rate"] < max(grid) for row in found.values())
    three = {row["family"]: row["upright"] for row in entry(EQUAL, "xavier")["rows"]}
    gains = [differences.difference(three[family], found["plain"]["upright"]) for family in ("I8", "D8")]
    assert all(map(differences.resolved, gains))
    yield "I8 of the table leads by {:.1f} points and D8 by {:.1f}, resolved".format(*(100 * g["gap"] for g in gains))
    yield "both rates lie inside it"


def registers_sentences():
    (row,) = entry("studies/jumbo_rates", "xavier_lower")["rows"]
    yield "{:.1f} % on held-out images instead of {:.1f}".format(*(100 * v for v in row["held_out"].values()))


def cifar10_sentences():
    found, before = entry(EQUAL, "cifar10_xavier"), rows_by(EQUAL, "cifar10", "model")
    upright = [gain for name, gain in found["gains"].items() if "upright" in name]
    points = [100 * gain["gap"] for gain in upright]
    yield f"all three stay above plain by {min(points):.0f} to {max(points):.0f} points, resolved"
    assert all(map(differences.resolved, upright))
    eight = "cifar10, eight orientations: {}, equal multiply-adds, minus plain"
    assert {f"{100 * found['gains'][eight.format(family)]['gap']:.0f}" for family in ("I8", "D8")} == {"16"}
    yield "I8 and D8 are 16 points above plain"
    more = [upright_mean(row) - upright_mean(before[(row["model"],)]) for row in found["rows"]]
    assert 0 < min(more) < max(more) < 2
    yield "no model gains more than 2 points"


def pattern_sentences():
    name, gain = "octic_equal_compute", "patterns, upright: {}, equal multiply-adds, minus plain"
    octic = name, gain.format("D8"), "patterns"
    yield f"D8 is {gap(*octic)} points above plain, {verdict(*octic)}"
    assert {verdict(name, gain.format(family), "patterns") for family in ("H8", "I8")} == {"not resolved"}
    found = {key: {row["family"]: row for row in entry(EQUAL, key)["rows"]} for key in ("patterns", "patterns_lower")}
    best, second, *_ = sorted((100 * value for value in found["patterns"]["I8"]["held_out"].values()), reverse=True)
    yield f"by {best - second:.1f} points on held-out images, {best:.1f} to {second:.1f}"
    lower = gain.format("I8"), "patterns_lower"
    upright = spread(found["patterns_lower"]["I8"]["upright"])
    yield f"tried after this result, it has {upright} and is {gap(name, *lower)} points above plain "
    yield f"(standard error {error(name, *lower)}), {verdict(name, *lower)}"
    more = [100 * max(row["held_out"].values()) - upright_mean(row) for row in found["patterns"].values()]
    yield f"up to {max(more):.0f} points more on held-out images"


def dinov2_sentences():
    three, six, probe = "blood_cells_xavier", "blood_cells_xavier_six", "linear_probe/top1"

    def points(gain, key):
        return gap("dinov2_small_images", gain, key), error("dinov2_small_images", gain, key)

    def judged(gain, key):
        return verdict("dinov2_small_images", gain, key)

    start, ahead, added, nearest = (
        f"I8 - plain, {what}" for what in (f"start {probe}", probe, f"added to {probe}", KNN)
    )
    yield "{} points above plain's (standard error {}), not resolved".format(*points(ahead, three))
    found = entry(DINOV2, three)["rows"]
    yield f"six resolve {least_of_six(found['I8'][probe], found['plain'][probe]):.1f} points"
    yield "I8 is then {} points above plain (standard error {}), resolved".format(*points(ahead, six))
    yield "At the start it is {} points above ({})".format(*points(start, six))
    yield "Training adds {} points less to I8's probe than to plain's ({}, not resolved)".format(*points(added, six))
    yield "I8's lead of {} points ({}) is not resolved".format(*points(nearest, six))
    verdicts = [judged(gain, six) for gain in (start, ahead, added, nearest)]
    assert verdicts == ["resolved", "resolved", "not resolved", "not resolved"]
    begins, ends, adds, nearest = (
        f"H8 - plain, {what}" for what in (f"start {probe}", probe, f"added to {probe}", KNN)
    )
    assert abs(entry(DINOV2, six)["gains"][begins]["gap"]) < 0.001  # level
    yield "ends {} points below ({}); by nearest neighbours it ends {} below ({}), both resolved".format(
        *points(ends, six), *points(nearest, six)
    )
    yield "adds {} points less to its probe than to plain's ({}, not resolved)".format(*points(adds, six))
    verdicts = [judged(ahead, three), *(judged(gain, six) for gain in (begins, ends, nearest, adds))]
    assert verdicts == ["not resolved", "not resolved", "resolved", "resolved", "not resolved"]
    before, after = (entry(DINOV2, key)["rows"] for key in ("blood_cells", six))
    means = [100 * (statistics.fmean(after[f][probe]) - statistics.fmean(before[f][probe])) for f in after]
    yield "the probe ends {:.1f} points higher for plain, {:.1f} for H8 and {:.1f} for I8".format(*means)


def baselines():
    name, pairs = "jumbo_baselines", [f"equal {what}: jumbo - registers" for what in ("epochs", "time")]
    jumbo, registers = (entry(f"studies/{name}", "xavier")["rows"][model] for model in ("jumbo", "registers"))
    epochs, time = (spread(registers[f"equal {what}"]) for what in ("epochs", "time"))
    yield f"Jumbo has {spread(jumbo['equal epochs'])} and registers {epochs}, {time} in equal time"
    (first, of_first), (second, of_second) = (
        (gap(name, pair, "xavier"), error(name, pair, "xavier")) for pair in pairs
    )
    yield f"{first} points ahead (standard error {of_first}), and {second} ({of_second}) in equal time, both resolved"
    assert {verdict(name, pair, "xavier") for pair in pairs} == {"resolved"}
    three = differences.difference(jumbo["equal epochs"][:3], registers["equal epochs"][:3])
    yield f"Three seeds gave {100 * three['gap']:.1f} ({100 * three['standard_error']:.1f})"
    baselines = {key: row["equal time"] for key, row in entry(f"studies/{name}")["rows"].items()}
    ahead = differences.difference(baselines.pop("shvit"), jumbo["equal time"])
    yield f"by {100 * ahead['gap']:.1f} points ({100 * ahead['standard_error']:.1f})"
    assert all(statistics.fmean(values) < statistics.fmean(jumbo["equal time"]) for values in baselines.values())


def upright_mean(row) -> float:
    """The mean accuracy upright, in percent."""
    return 100 * statistics.fmean(row["upright"])


def share_of_registers(key: str) -> float:
    """Jumbo's gain at width 48, in percent of the accuracy of registers."""
    found = entry("studies/jumbo_rates", key)
    registers = next(row["top1"] for row in found["rows"] if row["arm"] == "registers")
    return 100 * found["gains"]["Jumbo - registers, 48"]["gap"] / statistics.fmean(registers)


def chosen(row) -> bool:
    """Whether a row is of blood cells, and not of equal step time."""
    return row["data"] == "blood_cells" and row["rule"] != "step time"
