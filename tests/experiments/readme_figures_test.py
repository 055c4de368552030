"""Figures in the README of the experiments, to their last digit: what their commands print or have written."""

import json
import pathlib
import re

import pytest

from equivit import summarize
from experiments.octic_complexity import FLAVOURS, PAPER, SIZES

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "experiments" / "README.md").read_text()
CASES = [(size, family) for size in ("l", "h") for family in ("plain", "H8", "I8", "D8", "H2", "D2")]


def row(first: str) -> list[str]:
    """The other cells of the first row of a table that begins with `first`."""
    line = re.search(rf"^\| {re.escape(first)} \|.*\|$", README, re.MULTILINE)
    return [cell.strip() for cell in line[0].split("|")[2:-1]]


def results(name: str) -> dict:
    return json.loads((ROOT / "experiments" / "results" / name).read_text())["rows"]


@pytest.mark.parametrize(("size", "family"), CASES)
def test_costs_are_those_that_the_command_prints(size, family, capsys):
    title, variant, _ = SIZES[size]
    model = f"--model={FLAVOURS[family]}_{variant}"
    assert summarize.main([model, f"--model.family={family}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parameters, _, paper, *_ = PAPER[size][family]
    millions, fused, unfused = found["parameters"] / 1e6, found["fvcore"] / 1e9, found["fvcore_unfused"] / 1e9
    expected = [f"{millions:.2f}", f"{parameters:.1f}", f"{fused:.2f}", f"{unfused:.2f}", f"{paper:.1f}"]
    assert row(title if family == "plain" else f"{family}({title})") == expected


def test_memory_is_compared_with_both_plain_models():
    rows = results("octic_complexity.json")["h"]
    mib = {name: rows[name]["forward_mib"] for name in ("plain", "D8", "timm")}
    ours, timm = (mib[name] / mib["D8"] for name in ("plain", "timm"))
    assert f"D8 takes {ours:.2f} times less memory than our plain model and {timm:.2f} times less than timm's" in README
    assert f"to timm's plain ViT-H/14 it is {timm:.2f}x" in README
    assert row("ViT-H/14")[0] == "632.13" and f"| {results('octic_scaling_h_g_e.json')['h']['memory']:.2f}x |" in README
    parameters = rows["plain"]["parameters"] * 1e6 / 2**20
    assert f"in float32 and in bfloat16 ({4 * parameters:,.0f} and {2 * parameters:,.0f} MiB)" in README


def test_pages_agree_on_what_has_run_where():
    """And on what agrees with the official codes."""
    pages = [(ROOT / page / "README.md").read_text() for page in ("", "configs")]
    run = "Tested on one H100: the quickstart, forward passes and single training steps; no recipe has been run in full"
    assert all(run in page and "Not yet run on a TPU." in page for page in pages)
    assert "no released checkpoint has been loaded" in pages[0] and "No released checkpoint has been loaded" in README
