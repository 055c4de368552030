"""Evaluation protocols, one per file."""
