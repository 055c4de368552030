"""Messages: one line of text, whatever is in them."""

import pytest

from equivit import errors


@pytest.mark.parametrize(
    "text, line",
    [
        ("a\nb\t c", "a b c"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\udcff \u202e", "\\udcff \\u202e"),
        ("a\u2028b \u00e9", "a b \u00e9"),
    ],
)
def test_a_line_has_only_what_can_be_printed(text, line):
    assert errors.line(text) == line
    assert errors.line(text).encode().decode().isprintable()


def test_a_line_has_no_very_long_word():
    assert len(errors.line(f"/{'a' * 80_000}.png is not an image")) < 500


def test_errors_of_other_libraries_are_short():
    assert errors.reason(KeyError("a\nb")) == "KeyError: 'a\\nb'"
    assert errors.reason(ValueError("a.\n")) == "ValueError: a"
    assert len(errors.reason(ValueError("a b " * 10_000))) < 500
    assert len(errors.word("a" * 10_000)) < 100


def test_a_name_in_other_case_is_the_nearest():
    assert errors.near("d8", ["I8", "D8"], 1) == ["D8"] and errors.near("d9", ["I8", "D8"], 1) == []


def test_a_missing_path_is_named_with_its_neighbour_or_its_missing_directory(tmp_path):
    (tmp_path / "images.npz").touch()
    assert errors.nearest_path(tmp_path / "image.npz") == "; the nearest is 'images.npz'"
    assert errors.nearest_path(tmp_path / "weights.pth") == ""
    assert errors.nearest_path(tmp_path / "data" / "x.npz") == f"; there is no directory {tmp_path}/data either"
