"""Evaluation: protocols, one per file in `protocols/`, the measurements that they use, and the figures of a run."""
