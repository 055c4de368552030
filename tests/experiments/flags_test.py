"""Flags that scripts share."""

import importlib

import pytest

from experiments import flags


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--runs=0", "argument --runs: 0 must be a whole number, at least 1"),
        ("--warmup=-1", "argument --warmup: -1 must be a whole number, at least 0"),
        ("--minutes=-2", "argument --minutes: -2 must be a number, at least 0"),
        ("--minutes=nan", "argument --minutes: nan must be a number, at least 0"),
        ("--runs=x", "argument --runs: x must be a whole number, at least 1"),
    ],
)
def test_numbers_that_no_timing_takes_are_told(option, message, capsys):
    with pytest.raises(SystemExit):
        flags.timing_parser("A benchmark.", "x.py").parse_args([option])
    assert message in capsys.readouterr().err
    assert flags.timing_parser("A benchmark.", "x.py").parse_args(["--minutes=0.5"]).minutes == 0.5


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *((f"benchmarks.{name}", "--minutes") for name in ("sigma_cost", "crops_rate", "segmentation_costs")),
        *(
            (f"studies.{name}", "--epochs")
            for name in ("jumbo_mae", "adaptive_longer", "octic_angles", "octify_small_images")
        ),
    ],
)
def test_a_script_has_no_length_that_it_does_not_read(name, flag, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{name}").main(["--help"])
    assert "--output" in (shown := capsys.readouterr().out) and flag not in shown


def test_a_script_says_in_one_line_what_is_wrong(capsys):
    def main(arguments):
        raise FileNotFoundError(f"there is\nno {arguments}.")

    assert flags.run(main, "file") == 1
    assert capsys.readouterr().err == "error: there is no file.\n"
