"""The papers' recipes, one experiment per file; README.md lists them.

A module `NAME` here is the recipe `--config=NAME:MODE`; its `get_config(mode)` returns the configuration.
`recipes.py` has the parts that they share.
"""

if __name__ != "equivit.configs":  # its modules would be loaded a second time
    raise ImportError("import equivit.configs, not configs; for another project's configs leave the root of the clone.")
