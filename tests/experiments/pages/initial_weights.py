"""Figures of experiments/studies/initial_weights.md."""

import statistics

from tests.experiments.pages.figures import Page, entry, spread

PAGE = Page("studies/initial_weights")
EQUAL = "studies/octic_equal_compute"


@PAGE.table(
    "blood cells, Xavier | width | best rate | upright | eight orientations | over plain, upright (standard error)"
)
def equal_compute_from_xavier():
    found = entry(EQUAL, "xavier")
    for row in found["rows"]:
        gain = found["gains"].get(f"blood_cells, upright: {row['model']}, minus plain")
        over = f"{100 * gain['gap']:+.1f} ({100 * gain['standard_error']:.1f})" if gain else ""
        cells = [str(row["width"]), f"{row['rate']:g}", spread(row["upright"]), spread(row["eight"])]
        yield [row["family"], *cells, over]


def sentences():
    rows = {
        key: {row["family"]: row["upright"] for row in entry(EQUAL, key)["rows"] if chosen(row)}
        for key in ("main", "xavier")
    }
    mean = {key: {family: 100 * statistics.fmean(row) for family, row in of.items()} for key, of in rows.items()}
    gained = [f"{mean['xavier'][family] - mean['main'][family]:.1f}" for family in ("plain", "H8", "I8", "D8")]
    yield "plain gains {} points upright, H8 {}, I8 {} and D8 {}".format(*gained)
    before, after = (mean[key]["H8"] - mean[key]["plain"] for key in ("main", "xavier"))
    yield f"H8's lead of {before:.1f} points shrinks to {after:.1f}"


def chosen(row) -> bool:
    """Whether a row is of blood cells, and not of equal step time."""
    return row["data"] == "blood_cells" and row["rule"] != "step time"
