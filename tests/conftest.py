"""Settings of the whole suite: eight virtual CPU devices, no display; warnings are errors (pyproject.toml)."""

import collections
import ctypes
import functools
import gc
import math
import os
import pathlib
import re
import resource
import sys

import pytest

# Most of the suite's time is compilation.  LLVM's optimisations change speed, not results; XLA's own passes all run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads where an operation comes from
os.environ.setdefault("MPLBACKEND", "Agg")
# Compiled programs stay for the next run, and are shared with the other worker, commands and notebooks.  A program is
# found by its text, its options and the flags of XLA.  JAX bounds the size only where `filelock` is installed, and then
# looks through all files at each compilation; `make clean` removes them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.random import core as random_core

# A program that another process is just writing into the cache, or was killed while writing, is compiled again; JAX
# warns of it, and tests look at what commands print.
CACHE = "ignore:Error reading persistent compilation cache entry:UserWarning"
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), CACHE)))

# XLA cuts a program into 32 parts, which are compiled in threads; here other processes use the other cores, and cutting
# costs a fifth of the time.  Half of what is left goes into the fusion emitters, which 0.10 can do without; later
# versions refuse that flag.
FLAGS = {"--xla_cpu_parallel_codegen_split_count": "1"}
# XLA aborts the process where a virtual device comes a minute late to a sum over all; a busy machine may be as slow.
FLAGS |= {f"--xla_cpu_collective_call_{what}_timeout_seconds": "3600" for what in ("warn_stuck", "terminate")}
if jax.__version_info__ < (0, 11):
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"{name}={value}" for name, value in FLAGS.items() if name not in given)])

# A fifth of the time spent in Python would go into looking for cycles among the objects of JAX; `programs` does it once
# a module.
gc.disable()

# JAX makes an MLIR context for each program, which is a quarter of a small program's time; here a module shares one.
# Later versions gain nothing by it.
contexts = functools.cache(mlir.make_ir_context)
if jax.__version_info__ < (0, 11):
    mlir.make_ir_context = contexts


def cut_from_a_longer_draw(draw):
    """Round the size of an eager draw up to a power of 2, and cut off the rest.

    A longer draw begins with the same values, so all sizes share a few programs.  JAX compiles a program for each
    shape, and random numbers take six times as long to compile as a sum.
    """

    def drawn(*arguments, shape, dtype):
        traced = any(isinstance(one, jax.core.Tracer) for one in arguments)
        if traced or any(map(np.ndim, arguments)) or not jax.sharding.get_abstract_mesh().empty:
            return draw(*arguments, shape=shape, dtype=dtype)
        number = math.prod(shape)
        longer = draw(*arguments, shape=(1 << max(number - 1, 0).bit_length(),), dtype=dtype)
        return jax.device_put(np.asarray(longer)[:number].reshape(shape))

    return drawn


for name in ("_normal", "_uniform"):
    setattr(random_core, name, cut_from_a_longer_draw(getattr(random_core, name)))

jax.config.update("jax_num_cpu_devices", int(os.environ.get("EQUIVIT_DEVICES", 8)))
jax.config.update("jax_platforms", "cpu")


# CPU seconds that the tests of a folder may take in both parts together, from an empty cache, with all reference files:
# those that were measured, which vary by a tenth.  What a change adds it must save elsewhere.  A run prints what its
# part took beside them; no test fails by time.
BUDGETS = {
    "training": 260,
    "models": 316,
    "kernels": 220,
    "colabs": 197,
    "parity": 167,
    "recipes": 120,
    "experiments": 167,
    "layers": 80,
    "evaluation": 101,
    "depthwise": 24,
    "objectives": 104,
    "data": 36,
    "fuzz": 31,
    "pretrained": 36,
    "symmetry": 18,
    "guarantees": 12,
    "targets": 1,
    "": 301,  # the modules beside the folders
}
# What takes longest begins first, so that no process is left alone with it.
FIRST = (
    "tests/training/commands_test.py",
    "tests/experiments",
    "tests/configs_test.py",
    "tests/parity/models_test.py",
    "tests/models",
    "tests/colabs",
)
# Folders of which `make test` runs what is marked `quick` alone; tests elsewhere may be marked `slow`.
SLOW = ("tests/experiments", "tests/recipes", "tests/colabs", "tests/fuzz")
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser):
    """`--part quick` runs the first case of each test that is not slow, `--part rest` all others."""
    parser.addoption("--part", choices=["quick", "rest"])


def pytest_configure(config):
    """Ignore here what other processes ignore by PYTHONWARNINGS."""
    config.addinivalue_line("filterwarnings", CACHE)


def pytest_collection_modifyitems(config, items):
    """Keep the tests of the part, and put the modules of FIRST first, in its order."""
    if part := config.getoption("--part"):
        quick = set(quick_tests(items))
        items[:] = [item for item in items if (item in quick) == (part == "quick")]
    rank = {prefix: i for i, prefix in enumerate(FIRST)}
    items.sort(key=lambda item: min((i for prefix, i in rank.items() if item.nodeid.startswith(prefix)), default=99))


def quick_tests(items):
    """The first case of each test that is not slow."""
    seen = set()
    for item in items:
        slow = item.nodeid.startswith(SLOW) or item.get_closest_marker("slow")
        if slow and not item.get_closest_marker("quick"):
            continue
        # absl numbers the cases of a test of a class.
        name = re.sub(r"\d+( \(.*)?$", "", item.name) if item.cls else getattr(item, "originalname", item.name)
        if (test := (item.nodeid.partition("::")[0], item.cls, name)) not in seen:
            seen.add(test)
            yield item


def pytest_collection_finish():
    """Freeze all imports, which live as long as the process: the collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Garbage goes after each module, and what JAX has compiled when the process has become large.

    What a module leaves behind is not looked at again before then.
    """
    yield
    contexts.cache_clear()  # a context keeps the constants of all its programs
    if sys.platform == "linux" and resident() < memory() / 8:  # .ci/run has five processes at a time
        gc.collect()
        gc.freeze()
        return
    jax.clear_caches()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed: 0.8 GB stay so, where 0.3 are in use


def resident() -> int:
    """Bytes of memory that this process has on Linux."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory() -> int:
    """Bytes of memory of a machine with Linux."""
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Note when a test begins, before its fixtures."""
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Note what a test has taken, with its fixtures; the report of the teardown brings it out of the worker."""
    result = yield
    item.user_properties.append(("cpu", cpu_seconds() - item.stash[STARTED]))
    return result


def pytest_terminal_summary(terminalreporter):
    """After a run: deviations from the official codes (tests/parity), and what each folder took of its budget."""
    _write_deviations(terminalreporter)
    _write_seconds(terminalreporter)


def _write_seconds(terminalreporter):
    folders = collections.Counter()
    for report in terminalreporter.getreports(""):  # setups and teardowns
        folder, _, rest = report.nodeid.partition("::")[0].removeprefix("tests/").partition("/")
        folders[folder if rest else ""] += dict(report.user_properties).get("cpu", 0.0)
    for folder, seconds in sorted(folders.items()):
        budget = f" of {BUDGETS[folder]}" if folder in BUDGETS else ""
        terminalreporter.write_line(f"tests/{folder}: {seconds:.0f}{budget} CPU seconds")


def _write_deviations(terminalreporter):
    """The largest deviation of each group of files."""
    groups = {}
    for report in terminalreporter.getreports("passed"):
        for group, deviation in (value for name, value in report.user_properties if name == "parity"):
            groups.setdefault(group, []).append(deviation)
    for group, deviations in sorted(groups.items()):
        terminalreporter.write_line(
            f"parity {group}: {len(deviations)} files, largest deviation {max(deviations):.1e} of the largest entry"
        )
