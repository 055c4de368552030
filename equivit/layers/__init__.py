"""Layers, one family per file; each is a drop-in replacement for the dense layer of the same name."""

import equivit

if getattr(equivit, "DISTRIBUTION", None) != "equivit-jax":  # both were installed into one folder
    raise ImportError(
        f"The package `equivit` at {equivit.__file__} is another project, installed over equivit-jax: "
        "pip uninstall equivit, then install equivit-jax again."
    )
