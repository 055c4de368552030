"""Accuracies and consistencies of "Making Vision Transformers Truly Shift-Equivariant" (arXiv 2305.16316), as data.

Tables 1, 2, 5, 6, A9, A10, A11 and A12.  Spreads are standard deviations over five seeds, where the paper has them.
"""

from typing import NamedTuple


class Cell(NamedTuple):
    """One training.

    Attributes:
      data: "cifar10", "cifar100", "imagenet" or "ade20k".
      shifts: "circular" or "standard".
      model: a name of the zoo.
      variant: "default", "da" (trained on circular shifts), "adaptive", "no token", "no window" or "no merge" (adaptive
        in all but one part), "adapted=20" (a default model, fine-tuned as an adaptive one for that many epochs).
    """

    data: str
    shifts: str
    model: str
    variant: str


class Number(NamedTuple):
    """A figure in percent and its spread, None where there is none."""

    mean: float
    spread: float | None = None


class Entry(NamedTuple):
    """A row of a table.

    Attributes:
      table: its name.
      cell: the runs that it is of.
      condition: "" for the runs as they ended, or a name of `further_evaluations.CONDITIONS`.
      range: of circular shifts, a name of `consistency.FRACTIONS`.
      top1: accuracy, on ADE20K mean IoU; None where the table has none.
      consistency: of the shifts of the cell, on ADE20K mASCC.
    """

    table: str
    cell: Cell
    condition: str
    range: str
    top1: Number | None
    consistency: Number


# Top-1 and consistency, each with its spread.
TABLE_1 = """
swin_t             90.15 .18 83.30 .61  71.01 .27 65.32 .69   90.11 .21 86.35 .25   71.12 .14 69.39 .52
swin_t,adaptive    93.39 .12 99.99 .01  75.11 .10 99.99 .01   93.50 .19 96.00 .08   75.12 .28 87.70 .57
swinv2_t           89.08 .21 89.16 .08  69.78 .22 75.23 .20   89.08 .21 91.68 .25   69.67 .32 80.42 .41
swinv2_t,adaptive  91.64 .21 99.99 .01  72.73 .23 99.96 .01   91.91 .12 95.81 .17   72.98 .13 88.74 .40
cvt_13             90.06 .23 75.80 1.2  66.61 .33 50.29 1.68  90.05 .20 84.66 1.26  66.06 .39 63.03 .73
cvt_13,adaptive    93.87 .14 100 .00    76.19 .32 100 .00     93.71 .10 96.47 .21   73.04 .23 86.96 .55
mvitv2_t           96.00 .06 86.55 1.2  80.18 .34 74.82 .73   96.14 .06 91.34 1.26  80.28 .38 77.92 .93
mvitv2_t,adaptive  96.41 .22 100 .00    81.39 .11 100 .00     96.61 .11 98.36 .16   81.17 .18 92.95 .16
"""
COLUMNS_1 = [("cifar10", "circular"), ("cifar100", "circular"), ("cifar10", "standard"), ("cifar100", "standard")]
TABLE_2 = """
swin_t             78.5 86.68   81.18 92.41
swin_t,adaptive    79.35 99.98  81.6 93.24
swinv2_t           78.95 87.68  81.76 93.24
swinv2_t,adaptive  79.91 99.98  82.10 94.04
cvt_13             77.01 86.87  81.59 92.80
cvt_13,adaptive    77.05 100    81.48 93.41
mvitv2_t           77.36 90.03  82.21 93.88
mvitv2_t,adaptive  77.46 100    82.4 94.08
"""
COLUMNS_2 = [("imagenet", "circular"), ("imagenet", "standard")]
# Mean IoU and mASCC, with UperNet.
TABLE_5 = """
swin_t             42.93 87.32  44.2 93.37
swin_t,adaptive    43.44 100    44.43 93.48
swinv2_t           43.86 88.16  44.26 93.23
swinv2_t,adaptive  44.42 100    46.11 93.59
"""
COLUMNS_5 = [("ade20k", "circular"), ("ade20k", "standard")]
# CIFAR-10 and circular shifts, from here on.
TABLE_6 = """
adaptive   93.39 .13 100
no token   93.66 .19 96.29 .20
no window  93.24 .15 95.62 .54
no merge   91.67 .10 94.62 .11
default    90.15 .18 83.30 .61
"""
TABLE_A9 = """
default   90.21 82.69  90.16 81.75  89.71 81.42  89.02 80.4   87.83 79.58
da        92.32 94.3   91.81 94.19  91.6 94.16   90.42 93.01  89.23 92.73
adaptive  93.53 100    93.27 100    92.71 100    91.57 100    90.3 100
"""
COLUMNS_A9 = ("", "erased 28", "erased 42", "erased 56", "erased 70")
TABLE_A10 = """
default   90.21 82.69  50.41 82.24
da        92.32 94.3   51.74 94.67
adaptive  93.53 100    52.07 100
"""
COLUMNS_A10 = ("", "flipped")
TABLE_A11 = """
swin_t             92.00 .23 89.65 .9   88.93 .09 88.13 .14
swin_t,adaptive    100 0     100 0      100 0     100 0
swinv2_t           92.13 .04 90.43 .17  89.67 .08 88.75 .15
swinv2_t,adaptive  100 0     100 0      100 0     100 0
cvt_13             88.99 .1  87.42 .16  86.96 .1  86.84 .06
cvt_13,adaptive    100 0     100 0      100 0     100 0
mvitv2_t           91.49 .04 90.57 .11  90.46 .08 90.22 .1
mvitv2_t,adaptive  100 0     100 0      100 0     100 0
"""
RANGES = ("quarter", "half", "three_quarters", "full")
TABLE_A12 = """
default      90.12 76.54
at once      57.4 100
adapted=10   91.72 100
adapted=20   92.35 100
adaptive     93.87 100
"""


def entries() -> list[Entry]:
    """All rows of all tables, in their order."""
    return [
        *_trained("1", TABLE_1, COLUMNS_1, spreads=True),
        *_trained("2", TABLE_2, COLUMNS_2, spreads=False),
        *_trained("5", TABLE_5, COLUMNS_5, spreads=False),
        *_table_6(),
        *_conditions("A9", TABLE_A9, COLUMNS_A9),
        *_conditions("A10", TABLE_A10, COLUMNS_A10),
        *_table_a11(),
        *_table_a12(),
    ]


def _trained(table: str, text: str, columns: list[tuple[str, str]], *, spreads: bool) -> list[Entry]:
    found = []
    for label, values in _lines(text):
        model, _, variant = label.partition(",")
        figures = [Number(*pair) for pair in _tuples(values, 2)] if spreads else [Number(value) for value in values]
        for column, (top1, consistency) in zip(columns, _tuples(figures, 2), strict=True):
            found.append(Entry(table, Cell(*column, model, variant or "default"), "", "full", top1, consistency))
    return sorted(found, key=lambda entry: columns.index(entry.cell[:2]))


def _table_6() -> list[Entry]:
    return [
        Entry("6", _cifar("swin_t", label), "", "full", Number(*values[:2]), Number(*values[2:]))
        for label, values in _lines(TABLE_6)
    ]


def _conditions(table: str, text: str, columns: tuple[str, ...]) -> list[Entry]:
    return [
        Entry(table, _cifar("swin_t", label), condition, "full", Number(top1), Number(consistency))
        for label, values in _lines(text)
        for condition, (top1, consistency) in zip(columns, _tuples(values, 2), strict=True)
    ]


def _table_a11() -> list[Entry]:
    found = []
    for label, values in _lines(TABLE_A11):
        model, _, variant = label.partition(",")
        for range_, pair in zip(RANGES, _tuples(values, 2), strict=True):
            found.append(Entry("A11", _cifar(model, variant or "default"), "ranges", range_, None, Number(*pair)))
    return found


def _table_a12() -> list[Entry]:
    found = []
    for label, (top1, consistency) in _lines(TABLE_A12):
        cell, condition = ("default", "adapted") if label == "at once" else (label, "")
        entry = Entry("A12", _cifar("cvt_13", cell), condition, "full", Number(top1), Number(consistency))
        found.append(entry)
    return found


def _cifar(model: str, variant: str) -> Cell:
    return Cell("cifar10", "circular", model, variant)


def _lines(text: str) -> list[tuple[str, list[float]]]:
    """Each line's label, which ends at the first two spaces, and its numbers."""
    rows = (line.split("  ", 1) for line in text.strip().splitlines())
    return [(label, [float(word) for word in rest.split()]) for label, rest in rows]


def _tuples(values: list, size: int) -> list[tuple]:
    return list(zip(*[iter(values)] * size, strict=True))
