"""`make package-test`: the installed package, beside Hugging Face's `kernels` and outside of the clone.

The script runs in an environment that has the wheel alone, in an empty directory.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(sys.prefix) / "bin" / "equivit"
CONFIG = """
import helper
from equivit.configs import quickstart


def get_config(mode="full"):
    config = quickstart.get_config("quicktest")
    config.steps = helper.STEPS
    return config
"""


def command(*arguments: str, path: str = "") -> subprocess.CompletedProcess:
    """Run the console script."""
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


def check_files() -> None:
    """The distribution has one package and the module of the console script; nothing else is on the top level."""
    files = [str(path) for path in importlib.metadata.files("equivit-jax") or ()]
    top = {name.partition("/")[0] for name in files if not name.startswith(("..", "__pycache__"))}
    information = {name for name in top if name.endswith(".dist-info")}
    assert top - information == {"equivit", "equivit_jax.py"}, top
    for name in ("py.typed", "kernels/attention/__init__.py", "configs/octic_h.py"):
        assert f"equivit/{name}" in files, name


def check_imports() -> None:
    """Hugging Face's `kernels` and equivit's own are two packages, and there is no `configs`."""
    import equivit.kernels

    kernels = importlib.import_module("kernels")
    assert hasattr(kernels, "get_kernel") and hasattr(equivit.kernels, "using")
    assert pathlib.Path(equivit.__file__).is_relative_to(sys.prefix)
    assert importlib.util.find_spec("configs") is None and importlib.util.find_spec("tests") is None


def check_commands() -> None:
    """Train a recipe by its name, and a config that imports a recipe and a module beside it."""
    for folder in ("mine", "other/equivit"):
        pathlib.Path(folder).mkdir(parents=True)
    pathlib.Path("mine/config.py").write_text(CONFIG)
    pathlib.Path("mine/helper.py").write_text("STEPS = 3")
    for config, steps in (("quickstart:quicktest", 2), ("mine/config.py", 3)):
        run = command("train", f"--config={config}", f"--workdir=runs/{steps}")
        assert run.returncode == 0 and f": {steps} steps of " in run.stdout, run.stdout + run.stderr
    pathlib.Path("other/equivit/__init__.py").touch()
    run = command("train", "--help", path=os.path.abspath("other"))
    assert run.returncode == 1 and "other/equivit/__init__.py is another project" in run.stderr, run.stderr


if __name__ == "__main__":
    check_files()
    check_imports()
    check_commands()
    print("The installed package works.")
