"""Figures of experiments/studies/exactness.md."""

from tests.experiments.pages.figures import Page, entry

PAGE = Page("studies/exactness")


@PAGE.table(
    "model | equal bits, float32 | bfloat16 | float64, no anchor | smallest gap | ordinary model | class changed",
)
def exactness():
    for name, row in entry("studies/adaptive_exactness")["rows"].items():
        equal = [f"{row[f'{dtype}_equal']:.0f} %" for dtype in ("float32", "bfloat16")]
        off = [f"{row[dtype]:.1e} off" for dtype in ("float32", "bfloat16")]
        cells = [*(off if name == "D8 ViT" else equal), f"{row['float64']:.1e}", f"{row['gap']:.1e}"]
        yield [name, *cells, f"{row['ordinary']:.2f}", f"{row['changed']:.1f} %"]


@PAGE.table("family | float64 | float32 | bfloat16")
def equivariance():
    for row in entry("studies/equivariance_errors")["rows"]:
        name = f"{row['family']} (field)" if row["measured"] == "field" else row["family"]
        yield [name, *(f"{row[dtype]:.1e}" if row[dtype] else "0" for dtype in ("float64", "float32", "bfloat16"))]


def sentences():
    yield "No released checkpoint has been loaded"
