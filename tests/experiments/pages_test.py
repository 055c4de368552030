"""Figures on the pages of experiments/, to their last digit: from the JSON files, or what their commands print."""

import json
import re

import pytest

from equivit import summarize
from experiments.tables.octic.complexity import FLAVOURS, PAPER, SIZES
from tests.experiments.pages import (
    adaptive,
    benchmarks,
    depthwise,
    exactness,
    initial_weights,
    jumbo,
    octify,
    studies,
    tables,
)
from tests.experiments.pages.figures import COMMANDS, ROOT

PAGES = dict(tables=tables, studies=studies, depthwise=depthwise, octify=octify, exactness=exactness)
PAGES |= dict(adaptive=adaptive, benchmarks=benchmarks, initial_weights=initial_weights, jumbo=jumbo)
TABLES = [(page, heading) for page in PAGES for heading in PAGES[page].PAGE.tables]
COSTS = "model | M parameters | paper | GFLOPs, fused | unfused | paper"
PARITY = "reference files | number | largest deviation"


@pytest.mark.parametrize(("page", "heading"), TABLES)
def test_a_table_has_the_figures_of_its_json(page, heading):
    found = PAGES[page].PAGE
    assert found.written()[heading] == list(found.tables[heading]())


@pytest.mark.parametrize("page", PAGES)
def test_every_table_is_checked(page):
    found = PAGES[page].PAGE
    assert set(found.written()) <= {*found.tables, COSTS, PARITY, *COMMANDS}


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_the_figures_of_the_json(page):
    for sentence in PAGES[page].sentences():
        assert sentence in PAGES[page].PAGE.text, sentence


@pytest.mark.parametrize("size", ["l", "h"])
@pytest.mark.parametrize("family", ["plain", "H8", "I8", "D8", "H2", "D2"])
def test_costs_are_those_that_the_command_prints(size, family, capsys):
    title, variant, _ = SIZES[size]
    model = f"--model={FLAVOURS[family]}_{variant}"
    assert summarize.main([model, f"--model.family={family}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parameters, paper = (PAPER[size][family][f"{key}_paper"] for key in ("parameters", "flops"))
    millions, fused, unfused = found["parameters"] / 1e6, found["fvcore"] / 1e9, found["fvcore_unfused"] / 1e9
    expected = [f"{millions:.2f}", f"{parameters:.1f}", f"{fused:.2f}", f"{unfused:.2f}", f"{paper:.1f}"]
    assert [title if family == "plain" else f"{family}({title})", *expected] in tables.PAGE.written()[COSTS]


def test_pages_agree_on_what_has_run_where():
    """And on what agrees with the official codes."""
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/how_to/several_gpus.md")]
    run = "Tested on one H100: the quickstart, forward passes and single training steps; no recipe has been run in full"
    assert all(run in page and "Not yet run on a TPU." in page for page in pages)
    assert "no released checkpoint has been loaded" in pages[0]
    assert "No released checkpoint has been loaded" in exactness.PAGE.text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_read_in_ten_minutes(page):
    assert len(re.sub(r"^\|.*\|$", "", PAGES[page].PAGE.text, flags=re.MULTILINE).split()) <= 2200
