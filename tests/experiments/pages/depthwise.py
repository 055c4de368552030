"""Figures of experiments/studies/depthwise.md."""

import statistics

from tests.experiments.pages.figures import Page, entry, error, gap, spread

PAGE = Page("studies/depthwise")


@PAGE.table("row | CIFAR-10, 2 epochs | blood cells, 9 epochs | CamVid, 10 epochs")
def depthwise_small():
    sets = [entry("studies/depthwise_small_images", data)["rows"] for data in ("cifar10", "blood_cells", "camvid")]
    names = {"attention": "stage 2 with attention", "lowest": "lowest Sigma", "highest": "highest Sigma"}
    names |= {"random": "random blocks", "damage": "least damage", "least squares": "lowest, taps by least squares"}
    names |= {"one-stage": "lowest, one-stage", "frozen": "lowest, frozen", "ens_dw": "lowest, Ens+DW"}
    for row in sets[0]:
        yield [names.get(row, row), *(spread(rows[row]) if row in rows else "" for rows in sets)]


@PAGE.table(
    "stage 2 | CIFAR-10: before | after | squared error | blood cells: before | after | squared error"
    " | CamVid: before | after | squared error"
)
def depthwise_forms():
    studies = [entry("studies/depthwise_small_images", f"{data}_forms") for data in ("cifar10", "blood_cells", "camvid")]
    for row in studies[0]["rows"]:
        cells = []
        for found in studies:
            before, errors = found["before"].get(row), found["errors"].get(row)
            cells += [spread(before) if before else "", spread(found["rows"][row])]
            cells.append(f"{statistics.fmean(errors):.2f}" if errors else "")
        yield [row, *cells]


def sentences():
    for data, words in (
        ("cifar10", "{} points on CIFAR-10 (standard error {})"),
        ("blood_cells", "{} on blood cells ({})"),
    ):
        pair = "lowest - highest"
        yield words.format(gap("depthwise_small_images", pair, data), error("depthwise_small_images", pair, data))
