"""Figures of experiments/studies/adaptive.md."""

import statistics

from tests.experiments.pages.figures import Page, constant, entry, error, gap, least_of_six, spread, verdict

PAGE = Page("studies/adaptive")
LONGER = "adaptive_longer"
HEADING = "{}, 2,500 steps | best rate | top-1 | shifted | shifted, zeros | C-Cons | S-Cons | training loss"


@PAGE.table(HEADING.format("Swin"), "swin")
@PAGE.table(HEADING.format("CvT"), "cvt")
def adaptive_longer(model: str):
    for arm, row in entry(f"studies/{LONGER}", model)["rows"].items():
        figures = [spread(row[key]) for key in ("top1", "shifted", "zeros")]
        cells = [*figures, constant(row["circular"]), spread(row["standard"]), f"{statistics.fmean(row['loss']):.3f}"]
        yield [arm, f"{row['rate']:g}", *cells]


ADAPTIVE = {"adaptive": "adaptive", "by input": "adaptive, by input", "no token": "without adaptive patches"}
ADAPTIVE |= {"no window": "without adaptive windows", "no merge": "without adaptive merging"}
ADAPTIVE |= {"da": "trained on circular shifts (DA)", "adapted 0": "trained, then adapted"}
ADAPTIVE |= {"adapted 1": "and tuned for 1 epoch", "adapted 2": "and tuned for 2 epochs"}


@PAGE.table("model | top-1 | C-Cons | S-Cons")
def adaptive_small_images():
    families = dict(swin="Swin", swinv2="SwinV2", cvt="CvT", mvitv2="MViTv2")
    rows = entry("studies/adaptive_small_images")["rows"]
    for name in sorted(rows, key=lambda name: list(families).index(name.split(" ")[0])):
        (family, _, variant), row = name.partition(" "), rows[name]
        label = f"... {ADAPTIVE[variant]}" if variant else families[family]
        yield [label, spread(row["top1"]), constant(row["circular"]), spread(row["zeros"])]


@PAGE.table("model | upright | eight orientations | same in eight | never changes | of the decided")
def adaptive_p4m():
    for name, row in entry("studies/adaptive_p4m")["rows"].items():
        counts = [f"{one:.0f}/{all_:.0f}" for one, all_ in zip(row["identical"], row["decided"], strict=True)]
        cells = [spread(row["upright"]), spread(row["eight"]), constant(row["turned"]), constant(row["constant"])]
        yield [name, *cells, ", ".join(counts)]


def of_longer(model: str):
    pairs = [f"{arm} - ordinary, top1" for arm in ("adaptive", "ordinary, trained on shifts", "adaptive, tuned")]
    place, trained, tuned = (gap(LONGER, pair, model) for pair in pairs)
    moved = "adaptive - ordinary, shifted"
    of_place, of_tuned = (error(LONGER, pair, model) for pair in (pairs[0], pairs[2]))
    sure = "" if verdict(LONGER, pairs[2], model) == "resolved" else ", not resolved"
    assert {verdict(LONGER, pair, model) for pair in (pairs[0], moved)} == {"resolved"}
    yield f"the adaptive model is {place} points below the ordinary one (standard error {of_place})"
    yield f"on circularly shifted images {gap(LONGER, moved, model)} above ({error(LONGER, moved, model)})"
    yield f"trained on shifts loses {trained} points in place"
    yield f"The arm tuned from the ordinary model is {tuned} points below it in place ({of_tuned}{sure})"


def tops_of_six(name: str, model: str) -> list[list[float]]:
    """Accuracies of six ordinary and of six adaptive models."""
    rows = entry(f"studies/{name}", f"{model}_six")["rows"]
    return [rows[arm]["top1"] for arm in (model, f"{model} adaptive")]


def of_six(name: str, model: str, title: str) -> str:
    """How an adaptive model differs in accuracy from the ordinary one, by six seeds."""
    ordinary, adaptive = map(spread, tops_of_six(name, model))
    difference = name, f"{model} adaptive - {model}, top1", f"{model}_six"
    less = f"{gap(*difference)} points less (standard error {error(*difference)}), {verdict(*difference)}"
    return f"{title} has {ordinary} and adaptive {title} {adaptive}: {less}"


def sentences():
    yield from of_longer("swin")
    yield from of_longer("cvt")
    zeros = "adaptive - ordinary, zeros"
    yield f"after shifts with zeros it is {gap(LONGER, zeros, 'cvt')} below ({error(LONGER, zeros, 'cvt')})"
    rates, rows = (entry(f"studies/{LONGER}", "cvt")[name] for name in ("rates", "rows"))
    inside = all(min(rates) < row["rate"] < max(rates) for row in rows.values())
    tuned, adaptive = rows["adaptive, tuned"], rows["adaptive"]
    above = all(statistics.fmean(tuned[key]) > statistics.fmean(adaptive[key]) for key in ("top1", "shifted", "zeros"))
    yield f"{'above' if above else 'not above'} the adaptive one in every column of accuracy"
    yield f"In every arm the best rate lies {'inside' if inside else 'at an edge of'} the grid"
    lower = [row["held_out"] for row in entry(f"studies/{LONGER}", "swin_lower")["rows"].values()]
    falls = [100 * (held_out["0.001"] - held_out["0.0003"]) for held_out in lower]
    yield f"on held-out images {min(falls):.1f} to {max(falls):.1f} points below (one seed"
    small = "adaptive_small_images"
    gains = {model: f"{model} adaptive - {model}, top1" for model in ("swin", "swinv2", "mvitv2", "cvt")}
    swin, v2, cvt, mvit = (
        f"{gap(small, gains[m])} ({error(small, gains[m])})" for m in ("swin", "swinv2", "cvt", "mvitv2")
    )
    v2 = v2.replace(" (", " points (standard error ")
    yield f"SwinV2 by {v2} and MViTv2 by {mvit}, resolved; Swin by {swin} and CvT by {cvt}, not resolved"
    verdicts = {model: verdict(small, gain) for model, gain in gains.items()}
    assert [model for model, said in verdicts.items() if said == "resolved"] == ["swinv2", "mvitv2"]
    yield f"{of_six(small, 'cvt', 'CvT')}."
    yield f"{of_six(small, 'swin', 'Swin')}, where {least_of_six(*tops_of_six(small, 'swin')):.1f} points would be"
    p4m = "p4m - plain, upright"
    yield f"{gap('adaptive_p4m', p4m)} points below plain (standard error {error('adaptive_p4m', p4m)})"
