"""The notebook on the symmetries of a model."""

import re

import pytest

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
@pytest.mark.quick
def test_it_runs_and_names_the_blocks_where_symmetries_break():
    text = notebook.run("symmetry")
    found = re.findall(r"^    (octic|shift) +(holds|breaks first at [\w ]*\w)", text, re.MULTILINE)
    embedding = "breaks first at the embedding"
    assert found == [
        ("octic", "breaks first at block 1"),
        ("shift", embedding),
        ("octic", embedding),
        ("shift", embedding),
        ("octic", embedding),
        ("shift", "holds"),
    ]
    assert re.search(r"^octic: element '\w+' deviates by [\d.]+e[+-]0\d at block 1 in float64", text, re.MULTILINE)
    assert text.endswith("None\n")
