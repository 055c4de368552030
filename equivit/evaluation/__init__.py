"""Evaluation: the protocols, one per file in `protocols/`, the measurements they use, and the figures of a run."""
