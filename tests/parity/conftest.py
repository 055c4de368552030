"""Parity is measured on optimised programs; those of users with XLA_FLAGS=--xla_cpu_use_fusion_emitters=true."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def optimised_programs():
    """The suite compiles without LLVM's optimisations, which round differently: up to 5.2e-6 instead of 3.2e-6."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
