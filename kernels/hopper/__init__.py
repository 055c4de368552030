"""Kernels of octic fields for Hopper GPUs (Pallas, Mosaic GPU), the parts of octic branches on them."""
