"""Layers, one family per file.

Layers of the same name play the same role.  The layers in `isotypic.py` take a `group`, and map fields to fields.
"""

import equivit

if getattr(equivit, "DISTRIBUTION", None) != "equivit-jax":  # both were installed into one folder
    raise ImportError(
        f"The package `equivit` at {equivit.__file__} is another project, installed over equivit-jax: "
        "pip uninstall equivit, then install equivit-jax again."
    )
