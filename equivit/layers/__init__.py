"""Layers, one family per file.

A layer has the role of the dense layer of the same name.  Those of `isotypic.py` take a `group` and map fields.
"""

import equivit

if getattr(equivit, "DISTRIBUTION", None) != "equivit-jax":  # both were installed into one folder
    raise ImportError(
        f"The package `equivit` at {equivit.__file__} is another project, installed over equivit-jax: "
        "pip uninstall equivit, then install equivit-jax again."
    )
