"""Settings of the whole suite: eight virtual CPU devices, strict numerics, and warnings as errors (pyproject.toml)."""

import os

import jax

os.environ.setdefault("MPLBACKEND", "Agg")  # no display in tests
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
