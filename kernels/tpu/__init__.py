"""Shared code of the TPU kernels: blocks and tiles of a field, matrix products, branches of an octic block."""
