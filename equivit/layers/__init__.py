"""Layers, one family per file; each is a drop-in for the dense part of the same name."""
