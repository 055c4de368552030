"""Run a command of equivit; without a name, list all of them.

equivit train --config=quickstart --workdir=runs/quickstart
python -m equivit train --config=quickstart --workdir=runs/quickstart
"""

import importlib
import sys

from equivit import errors

COMMANDS = (
    "accelerate",
    "compare",
    "convert",
    "evaluate",
    "export",
    "predict",
    "profile",
    "summarize",
    "sweep",
    "train",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names, with the other arguments; return its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"equivit {importlib.import_module('equivit').__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command '{errors.word(name)}'{errors.nearest(name, COMMANDS)}.", file=sys.stderr)
        return 2
    return importlib.import_module(f"equivit.{name}").main(rest)


def _help() -> str:
    """The commands, each with the first line of its docstring."""
    docstrings = {name: importlib.import_module(f"equivit.{name}").__doc__ or "" for name in COMMANDS}
    text = "\n".join(f"  {name:12}{docstring.splitlines()[0]}" for name, docstring in docstrings.items())
    return f"usage: equivit COMMAND ...\n\n{text}\n\n`equivit COMMAND --help` describes a command."


if __name__ == "__main__":
    sys.exit(main())
