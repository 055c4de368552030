"""Layers, one family per file; each is a drop-in replacement for the dense layer of the same name."""
