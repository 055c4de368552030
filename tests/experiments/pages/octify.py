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
    words = {"H8": "{} points above H8 from scratch with the same steps (standard error {})"}
    words |= {"I8": "It is {} points above I8 from scratch"}
    for family, sentence in words.items():
        gain = found["gains"][f"{family}, octify - {family}, scratch, a third, upright"]
        yield sentence.format(*(f"{100 * gain[key]:.1f}" for key in ("gap", "standard_error")))
    rows = {name: statistics.fmean(row["eight orientations"]) for name, row in found["rows"].items()}
    yield f"averaging its features gains {100 * (rows['teacher, averaged'] - rows['teacher']):.1f} points"
    yield f"H8 has {spread(found['rows']['H8, start']['upright']).split(' ')[0]} % before any training"
    left = statistics.fmean(found["features"]["I8"]["error of class tokens"]["stage2"])
    yield f"I8 leaves {100 * left:.0f} % of the variance of the class tokens"
    gains = entry(NAME, "cifar10")["gains"]
    over = gains["I8, octify - teacher, eight orientations"]
    yield f"I8 is {100 * over['gap']:.1f} points above it over the eight orientations"
    yield f"(standard error {100 * over['standard_error']:.1f}, resolved), and "
    yield f"{100 * gains['I8, octify - I8, scratch, a third, upright']['gap']:.1f} above I8 from scratch with as many"
