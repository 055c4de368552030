"""Imports run one way, and `equivit` itself imports nothing."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# What each room may import from, beside itself.  Commands (equivit/*.py) may import everything.
ALLOWED = {
    "archives": {"errors"},
    "errors": set(),
    "files": {"errors"},
    "intervals": {"errors"},
    "constraints": {"errors", "intervals"},
    "sections": {"constraints"},
    "metrics_files": {"errors"},
    "precision": {"errors", "kernels"},
    "trained_on": {"errors"},
    "safetensors_files": {"errors", "files"},
    "derivatives": set(),
    "symmetry": {"errors", "derivatives", "kernels"},
    "kernels": {"derivatives"},
    "targets": {"errors", "kernels"},
    "data": {"archives", "errors", "intervals", "constraints", "sections"},
    "layers": {"errors", "derivatives", "symmetry", "kernels"},
    "logical": {"layers"},
    "models": {
        "errors",
        "intervals",
        "constraints",
        "derivatives",
        "files",
        "safetensors_files",
        "trained_on",
        "symmetry",
        "kernels",
        "layers",
        "logical",
    },
    "depthwise": {"errors", "symmetry", "kernels", "layers", "logical", "models", "data"},
    "objectives": {
        "errors",
        "intervals",
        "constraints",
        "precision",
        "symmetry",
        "layers",
        "logical",
        "models",
        "depthwise",
        "data",
    },
    "evaluation": {
        "archives",
        "errors",
        "files",
        "constraints",
        "sections",
        "metrics_files",
        "precision",
        "trained_on",
        "symmetry",
        "layers",
        "logical",
        "models",
        "objectives",
        "data",
    },
    "pretrained": {
        "archives",
        "errors",
        "files",
        "constraints",
        "safetensors_files",
        "trained_on",
        "symmetry",
        "layers",
        "logical",
        "models",
    },
    "training": {
        "errors",
        "files",
        "intervals",
        "constraints",
        "sections",
        "metrics_files",
        "precision",
        "trained_on",
        "kernels",
        "symmetry",
        "layers",
        "logical",
        "models",
        "depthwise",
        "objectives",
        "evaluation",
        "pretrained",
        "data",
    },
}
# Imports inside a function, which is called with weights only; and a command with the name of a room.
EXCEPT = {"equivit/models/zoo.py": {"pretrained"}}
EXCEPT["equivit/symmetry/__main__.py"] = {"command", "data", "files", "guarantees", "predict", "training"}

# Folders of experiments/ that each of them may import from, beside itself and what all share.
EXPERIMENTS = {"tables": set(), "studies": {"tables"}, "benchmarks": {"tables", "studies"}}


def imported(path):
    """The full names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms_imported(path):
    """The rooms that a file imports from, anywhere in it."""
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "equivit" and len(parts) > 1:
            yield parts[1]


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room):
    for path in [*(ROOT / "equivit" / room).rglob("*.py"), *ROOT.glob(f"equivit/{room}.py")]:
        allowed = ALLOWED[room] | {room} | EXCEPT.get(path.relative_to(ROOT).as_posix(), set())
        wrong = set(rooms_imported(path)) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports from {sorted(wrong)}"


def experiments_imported(path):
    """The folders of experiments/ that a file imports from."""
    names = [name.split(".") for name in imported(path)]
    return {parts[1] for parts in names if parts[0] == "experiments" and parts[1] in EXPERIMENTS}


@pytest.mark.parametrize("folder", EXPERIMENTS)
def test_experiments_import_one_way(folder):
    for path in (ROOT / "experiments" / folder).rglob("*.py"):
        wrong = experiments_imported(path) - EXPERIMENTS[folder] - {folder}
        assert not wrong, f"{path.relative_to(ROOT)} imports from {sorted(wrong)}"


def test_nothing_imports_experiments():
    for path in [p for room in ("equivit", "kernels", "configs") for p in (ROOT / room).rglob("*.py")]:
        assert "experiments" not in {name.split(".")[0] for name in imported(path)}, path
    shared = (ROOT / "experiments").glob("*.py")
    assert not [path for path in shared if experiments_imported(path)]


def test_the_package_imports_nothing():
    assert not list(rooms_imported(ROOT / "equivit" / "__init__.py"))
    assert "import " not in (ROOT / "equivit" / "__init__.py").read_text()


@pytest.mark.parametrize("room", ["layers", "models"])
def test_layers_and_models_hold_equations(room):
    """Forms for a platform or a compiler lie in `kernels`."""
    words = ("platform_dependent", "optimization_barrier", "layout_constraint", "pallas")
    for path in (ROOT / "equivit" / room).rglob("*.py"):
        found = [word for word in words if word in path.read_text()]
        assert not found, f"{path.relative_to(ROOT)} has {found}"
