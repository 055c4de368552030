"""Parity is measured on the programs that users run; after a run, the largest deviations by group of files."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def optimised_programs():
    """The suite compiles without LLVM's optimisations, which round differently: up to 5.2e-6 instead of 3.2e-6."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_terminal_summary(terminalreporter):
    groups = {}
    for report in terminalreporter.getreports("passed"):
        for group, deviation in (value for name, value in report.user_properties if name == "parity"):
            groups.setdefault(group, []).append(deviation)
    for group, deviations in sorted(groups.items()):
        terminalreporter.write_line(
            f"parity {group}: {len(deviations)} files, largest deviation {max(deviations):.1e} of the largest entry"
        )
