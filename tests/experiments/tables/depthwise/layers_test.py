"""The counts of the replacements of attention."""

from experiments.tables.depthwise import layers
from tests.experiments.scripts import run


def test_counts_are_the_papers(tmp_path, capsys):
    status, found = run(layers, tmp_path)
    assert status == 0 and [claim["holds"] for claim in found["claims"]] == [True] * (3 * 5 + 2 * 6 + 3)
    assert "12.08" in capsys.readouterr().out


def test_what_differs_from_the_paper_fails():
    row = layers.count(
        dict(kind="dw", heads=12, tokens=256, dtype="float32", gflop="0.61", parameters="1.189", memory="")
    )
    assert [claim.holds for claim in layers.claims_of(row)] == [True, True]
    for wrong in (dict(gflop=0.595), dict(parameters=1.1875), dict(paper_gflop="0.63")):
        assert False in [claim.holds for claim in layers.claims_of(row | wrong)], wrong
