"""Evaluation: the protocols, one per file in `protocols/`, what they measure with, and the pictures of a run."""
