"""Shared by the TPU kernels: blocks and tiles of a field, products on the matrix units, branches of an octic block."""
