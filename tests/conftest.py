"""Settings of the whole suite: eight virtual CPU devices, no display; warnings are errors (pyproject.toml)."""

import os

# Most of the suite's time is compilation.  LLVM's optimisations change speed, not results; XLA's own passes all run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

# The fusion emitters of this XLA take half of the compile time.  Later ones have no others, and end at a flag unknown.
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


def pytest_terminal_summary(terminalreporter):
    """After a run: the largest deviation from the official codes, by group of files (tests/parity)."""
    groups = {}
    for report in terminalreporter.getreports("passed"):
        for group, deviation in (value for name, value in report.user_properties if name == "parity"):
            groups.setdefault(group, []).append(deviation)
    for group, deviations in sorted(groups.items()):
        terminalreporter.write_line(
            f"parity {group}: {len(deviations)} files, largest deviation {max(deviations):.1e} of the largest entry"
        )
