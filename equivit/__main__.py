"""Run a command of equivit; without a name, list all of them.

equivit train --config=quickstart --workdir=runs/quickstart
python -m equivit train --config=quickstart --workdir=runs/quickstart
"""

import ast
import importlib
import pathlib
import sys

from equivit import __version__, errors

COMMANDS = (
    "accelerate",
    "compare",
    "convert",
    "evaluate",
    "export",
    "octify",
    "predict",
    "profile",
    "summarize",
    "sweep",
    "symmetry",
    "train",
)
ROOMS = ("symmetry",)  # commands with the name of a room


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names, with the other arguments; return its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"equivit {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command '{errors.word(name)}'{errors.nearest(name, COMMANDS)}.", file=sys.stderr)
        return 2
    return importlib.import_module(module(name)).main(rest)


def module(name: str) -> str:
    """The module of a command; a command of the name of a room is the room's `__main__`."""
    return f"equivit.{name}.__main__" if name in ROOMS else f"equivit.{name}"


def _help() -> str:
    """The commands, each with the first line of its docstring."""
    folder = pathlib.Path(__file__).parents[1]
    trees = {name: ast.parse((folder / f"{module(name).replace('.', '/')}.py").read_text()) for name in COMMANDS}
    lines = (f"  {name:12}{(ast.get_docstring(tree) or '').splitlines()[0]}" for name, tree in trees.items())
    return "\n".join(("usage: equivit COMMAND ...\n", *lines, "\n`equivit COMMAND --help` describes a command."))


if __name__ == "__main__":
    sys.exit(main())
