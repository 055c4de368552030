"""Settings of the whole suite: eight virtual CPU devices, no display; warnings are errors (pyproject.toml)."""

import os

# Most of the suite's time is compilation.  LLVM's optimisations change speed, not results; XLA's own passes all run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
