"""Settings of the whole suite: eight virtual CPU devices, no display; warnings are errors (pyproject.toml)."""

import os

# Most of the suite's time is compilation.  LLVM's optimisations change speed, not results; XLA's own passes all run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

# Half of the compile time goes into XLA's fusion emitters, which 0.10 can do without.  Later versions refuse the flag.
EMITTERS, flags = "--xla_cpu_use_fusion_emitters", os.environ.get("XLA_FLAGS", "")
if jax.__version_info__ < (0, 11) and EMITTERS not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {EMITTERS}=false"

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
