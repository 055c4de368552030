"""Figures of experiments/studies/depthwise.md."""

import math
import statistics

from scipy import special

from experiments.studies import differences
from tests.experiments.pages.figures import ROOT, Page, entry, error, gap, spread, verdict

PAGE = Page("studies/depthwise")
NAME = "depthwise_small_images"
SETS = ("cifar10", "blood_cells", "camvid")


@PAGE.table("row | CIFAR-10, 2 epochs | blood cells, 9 epochs | CamVid, 10 epochs")
def depthwise_small():
    sets = [entry(f"studies/{NAME}", f"{data}_printed")["rows"] for data in SETS]
    names = {"attention": "stage 2 with attention", "lowest": "lowest Sigma", "highest": "highest Sigma"}
    names |= {"random": "random blocks", "damage": "least damage", "least squares": "lowest, taps by least squares"}
    names |= {"one-stage": "lowest, one-stage", "frozen": "lowest, frozen", "ens_dw": "lowest, Ens+DW"}
    for row in sets[0]:
        yield [names.get(row, row), *(spread(rows[row]) if row in rows else "" for rows in sets)]


@PAGE.table("CIFAR-10, Xavier, 4 epochs | before stage 2 | after | squared error before")
def depthwise_from_xavier():
    found = entry(f"studies/{NAME}", "cifar10_xavier")
    for row, after in found["rows"].items():
        before, errors = found["before"].get(row), found["errors"].get(row)
        yield [
            row,
            spread(before) if before else "",
            spread(after),
            f"{statistics.fmean(errors):.2f}" if errors else "",
        ]


@PAGE.table(
    "stage 2 | CIFAR-10: before | after | squared error | blood cells: before | after | squared error"
    " | CamVid: before | after | squared error"
)
def depthwise_forms():
    studies = [entry(f"studies/{NAME}", f"{data}_forms") for data in SETS]
    for row in studies[0]["rows"]:
        cells = []
        for found in studies:
            before, errors = found["before"].get(row), found["errors"].get(row)
            cells += [spread(before) if before else "", spread(found["rows"][row])]
            cells.append(f"{statistics.fmean(errors):.2f}" if errors else "")
        yield [row, *cells]


def sentences():
    yield from xavier_sentences()
    printed = [("lowest - highest", f"{data}_printed") for data in SETS] + [("lowest - one-stage", "cifar10_printed")]
    words = "by {} points on CIFAR-10 (standard error {}), {} on blood cells ({}) and {} on CamVid ({}), "
    words += "and two stages are {} points above one ({}). None of these is resolved"
    yield words.format(*(figure(NAME, *pair) for pair in printed for figure in (gap, error)))
    start = NAME, "least squares - lowest", "blood_cells_forms"
    before = entry(f"studies/{NAME}", start[2])["gains_before"][start[1]]
    points = [f"{100 * before[key]:.1f}" for key in ("gap", "standard_error")]
    assert not differences.resolved(before)
    yield "it is {} points above the blur on blood cells (standard error {}, not resolved)".format(*points)
    forms = [(NAME, "lowest - highest", f"{data}_forms") for data in SETS]
    words = "{}, {} and {} points above highest (standard errors {}, {} and {})"
    yield words.format(*(gap(*form) for form in forms), *(error(*form) for form in forms))
    blur, kept, linear = (
        (NAME, "lowest - normal", "cifar10_forms"),
        *((NAME, f"attention - {row}", "blood_cells_forms") for row in ("lowest", "identity")),
    )
    yield f"On CIFAR-10 the blur ends {gap(*blur)} points below normal taps ({error(*blur)}), {verdict(*blur)}"
    words = f"attention ends {gap(*kept)} points above lowest Sigma ({error(*kept)}) and {gap(*linear)} "
    yield f"{words}above one linear map in its place ({error(*linear)}), both resolved"
    others = [verdict(NAME, "attention - identity", f"{data}_forms") for data in ("cifar10", "camvid")]
    pairs = [verdict(NAME, pair, key) for pair, key in printed] + [verdict(*form) for form in forms] + others
    assert set(pairs) == {"not resolved"} and {verdict(*kept), verdict(*linear)} == {"resolved"}


def xavier_sentences():
    found = entry(f"studies/{NAME}", "cifar10_xavier")

    def said(pair: str, when: str = "gains") -> str:
        gain = found[when][pair]
        points = f"{100 * abs(gain['gap']):.1f} points ({100 * gain['standard_error']:.1f}, "
        return f"{points}{'resolved' if differences.resolved(gain) else 'not resolved'})"

    before, blur, squares = "gains_before", "lowest - normal", "least squares - lowest"
    yield f"Before stage 2 lowest Sigma is {said('lowest - highest', before)} above highest"
    yield f"and {said('lowest - identity', before)} above one linear map"
    yield f"After stage 2 lowest is {said('lowest - highest')} above highest"
    yield f"and two stages are {said('lowest - one-stage')} above one"
    linear = said("attention - identity")
    yield f"Attention ends {said('attention - lowest')} above lowest and {linear} above the linear map"
    yield f"The blur is {said(blur, before)} above normal taps before stage 2 and {said(blur)} below after"
    yield f"least squares {said(squares, before)} above the blur before it and {said(squares)} after"
    earlier = entry(f"studies/{NAME}", "cifar10_forms")["gains"]["lowest - highest"]["standard_error"]
    of_six = 100 * earlier * math.sqrt(3 / 6) * special.stdtrit(5, 1 - differences.LEVEL / 2)
    yield f"six seeds resolve {of_six:.1f} points between lowest and highest Sigma"
    results = (ROOT / "docs/results.md").read_text()
    points = [f"{100 * found[when]['lowest - highest']['gap']:.1f}" for when in (before, "gains")]
    assert "from Xavier's weights {} points above before stage 2 and {} after;".format(*points) in results
    two = found["gains"]["lowest - one-stage"]
    assert f"{100 * two['gap']:.1f} points from Xavier's weights" in results and differences.resolved(two)
