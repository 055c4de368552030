"""Run a script of experiments/; without a name, list all of them.

python -m experiments tables.octic.scaling --models=h
"""

import ast
import difflib
import importlib
import os
import pathlib
import sys

from experiments import flags

FOLDER = pathlib.Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Run the script that the first argument names, with the other arguments; returns its exit status."""
    known = scripts()
    if not arguments or arguments[0] not in known:
        print(*(f"{name:36}{title}" for name, title in known.items()), sep="\n")
        near = difflib.get_close_matches(arguments[0], known, 1, 0) if arguments else []
        print(*(f"\nerror: there is no script {arguments[0]}; nearest: {name}" for name in near), file=sys.stderr)
        return int(bool(arguments))
    name, *rest = arguments
    script = importlib.import_module(f"experiments.{name}")
    if (threads := getattr(script, "THREADS", None)) and hasattr(os, "sched_setaffinity"):
        # Before JAX starts its threads; processes that it starts inherit this.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    return flags.run(script.main, rest)


def scripts() -> dict[str, str]:
    """The first line of the docstring of every script, by its name."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if path.stem != "__main__" and any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body):
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
            found[name] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.argv[0] = " ".join(["python -m experiments", *given[:1]])  # argparse's usage shows it
    sys.exit(main(given))
