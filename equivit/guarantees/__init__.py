"""Symmetries of a model, proven block by block on random inputs and measured on images, with a report."""
