"""Names of targets, and what a machine without the CUDA plugin says."""

import importlib.util

import pytest

from equivit import targets


@pytest.mark.parametrize(
    ("text", "count", "hosts"), [("h200", 1, 1), ("h100x8", 8, 1), ("a100x64", 64, 8), ("h200x3", 3, 1)]
)
def test_names(text, count, hosts):
    target = targets.parse(text)
    assert (target.count, target.hosts) == (count, hosts) and target.card is targets.CARDS[text.split("x")[0]]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("h20x8", "'h20' is not one of h200, h100, a100"),
        ("h200x12", "the nearest is h200x16"),
        ("h200x128", "the nearest is h200x64"),
        ("h200x0", r"1 to 8, .* the nearest is h200x1\."),
        ("h200xtwo", "1 to 8"),
        ("h200x", "1 to 8"),
    ],
)
def test_other_names_are_refused(text, hint):
    with pytest.raises(ValueError, match=hint):
        targets.parse(text)


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="the CUDA plugin is installed")
def test_without_the_plugin_one_line_says_what_to_install():
    with pytest.raises(ValueError, match=r'pip install "jax\[cuda13-local\]"') as caught:
        targets.devices(targets.parse("h200x8"))
    assert "\n" not in str(caught.value)
