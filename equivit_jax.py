"""The console script `equivit`: outside the package, since the path may hold another project's `equivit` first.

The distribution is `equivit-jax`, because `equivit` on PyPI is another project.
"""

import sys


def main() -> int:
    """Run a command of equivit and return its exit status."""
    import equivit

    if getattr(equivit, "DISTRIBUTION", None) != "equivit-jax":
        place = equivit.__file__ or list(equivit.__path__)
        print(f"error: the package `equivit` at {place} is another project; uninstall it, or move it.", file=sys.stderr)
        return 1
    from equivit.__main__ import main as run

    return run()
