"""Compare runs.

    python -m equivit.compare runs/plain runs/octic
    python -m equivit.compare runs/sweep --output=runs/sweep

Writes comparison.png (curves over each other), comparison.md and comparison.csv (final figures, mean and spread over
seeds, and the keys of the config in which the runs differ).  Runs that differ in their seeds alone count as one recipe.
A directory of runs, such as a sweep or several seeds, stands for all of them.
"""

import argparse
import functools
import pathlib
import sys

from equivit import command


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_run, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("compare", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run directories, or directories of them"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path(), help="directory (default: the current one)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace) -> None:
    from equivit.training import comparison

    found = comparison.recipes(comparison.runs_in(options.runs))
    print(comparison.write(found, options.output))
    print(f"Done: {', '.join(str(options.output / name) for name in comparison.FILES)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
