"""Segmenters: a backbone and a decoder for label maps."""
