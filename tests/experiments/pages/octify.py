"""Figures of experiments/studies/octify.md."""

import statistics

from tests.experiments.pages.figures import Page, entry, spread

PAGE = Page("studies/octify")
NAME = "studies/octify_small_images"


@PAGE.table("blood cells | upright | eight orientations", "blood_cells")
@PAGE.table("CIFAR-10 | upright | eight orientations", "cifar10")
def accuracies(data: str):
    for name, row in entry(NAME, data)["rows"].items():
        yield [name, spread(row["upright"]), spread(row["eight orientations"])]


@PAGE.table("blood cells, squared error at the transition | layers | projected | drawn", "blood_cells")
def starts(data: str):
    for family, found in entry(NAME, data)["features"].items():
        errors = found["error by start"]
        yield [family, *(f"{statistics.fmean(errors[name]):.2f}" for name in ("layers", "projected", "drawn"))]


@PAGE.table("blood cells, cosine of class tokens | teacher | start | stage 1 | stage 2", "blood_cells")
def class_tokens(data: str):
    for family, found in entry(NAME, data)["features"].items():
        cosines = found["cosine of class tokens"]
        yield [family, *(f"{statistics.fmean(values):.3f}" for values in cosines.values())]


def sentences():
    found = entry(NAME, "blood_cells")
    share, below = (100 * claim["ours"] for claim in found["claims"])
    yield f"H8 keeps {share:.1f} % of the teacher's accuracy"
    yield f"I8 is {-below:.1f} points below the teacher over the eight orientations"
    gains = found["gains"]

    def over(family, other, figure="upright"):
        gain = gains[f"{family}, octify - {other}, {figure}"]
        return [f"{100 * abs(gain[key]):.1f}" for key in ("gap", "standard_error")]

    same, longer = over("H8", "H8, scratch, a third"), over("H8", "H8, scratch")
    yield "{} points above H8 from scratch with the same steps (standard error {})".format(*same)
    yield "{} above H8 from scratch with all of the teacher's steps ({})".format(*longer)
    yield f"It is {over('I8', 'I8, scratch, a third')[0]} points above I8 from scratch with the same steps"
    yield "With labels and all of the teacher's steps, I8 is {} points above it ({}, p = {:.3f})".format(
        *over("I8", "I8, scratch"), gains["I8, octify - I8, scratch, upright"]["p"]
    )
    rows = {name: statistics.fmean(row["eight orientations"]) for name, row in found["rows"].items()}
    yield f"averaging its features gains {100 * (rows['teacher, averaged'] - rows['teacher']):.1f} points"
    yield f"H8 has {spread(found['rows']['H8, start']['upright']).split(' ')[0]} % before any training"
    left = statistics.fmean(found["features"]["I8"]["error of class tokens"]["stage2"])
    yield f"I8 leaves {100 * left:.0f} % of the variance of the class tokens"
    found = entry(NAME, "cifar10")
    yield f"H8 keeps {100 * found['claims'][0]['ours']:.1f} % of the teacher's accuracy. Here"
    gains = found["gains"]
    lead = "I8 is {} points above it over the eight orientations (standard error {}, resolved), "
    same, longer = over("I8", "I8, scratch, a third"), over("I8", "I8, scratch")
    lead += f"{same[0]} above I8 from scratch with as many steps, and {longer[0]} below I8 from scratch with all steps"
    yield lead.format(*over("I8", "teacher", "eight orientations"))
