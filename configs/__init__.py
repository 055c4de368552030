"""The papers' recipes, one experiment per file; README.md lists them.

A module `NAME` here is the recipe `--config=NAME:MODE`; its `get_config(mode)` returns the configuration.
`recipes.py` has the parts that they share.
"""
