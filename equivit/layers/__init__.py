"""Layers, one family per file; each is a drop-in replacement for the dense layer of the same name."""

import importlib.util

try:
    import kernels.dispatch  # noqa: F401
except ImportError as error:
    spec = importlib.util.find_spec("kernels")
    found = "none was found"
    if spec is not None:
        found = f"the one at {list(spec.submodule_search_locations or [spec.origin])} is a different one"
    raise ImportError(
        f"equivit needs its own package `kernels`, but {found}: run from the root of the repository, or uninstall the "
        "other package of that name."
    ) from error
