"""Files of an installation, names of its modules, and the console script; `make package-test` installs it."""

import importlib
import os
import pathlib
import pkgutil
import re
import sys
import tomllib

import pytest

import equivit
import equivit_jax
from equivit import __main__ as program
from equivit.training import config as configs

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = {name: ROOT / "equivit" / name for name in ("kernels", "configs")}


def test_an_installation_has_everything_inside_one_package():
    """setuptools follows the links: it finds packages below `equivit` alone, and copies the data files it is given."""
    for name, link in LINKS.items():
        assert os.readlink(link) == f"../{name}" and link.samefile(ROOT / name)
    settings = PROJECT["tool"]["setuptools"]
    assert settings["packages"]["find"] == {"include": ["equivit*"]} and settings["py-modules"] == ["equivit_jax"]
    found = {path for link in (ROOT / "equivit", *LINKS.values()) for path in link.rglob("*") if path.is_file()}
    data = {path for path in found if path.suffix not in (".py", ".pyc", ".md")}
    listed = [ROOT / key.replace(".", "/") / name for key, names in settings["package-data"].items() for name in names]
    assert data <= set(listed), "a data file is missing in pyproject.toml"


def test_every_folder_with_modules_is_a_package():
    for folder in (ROOT / "equivit", *LINKS.values()):
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_no_module_is_loaded_under_two_names():
    """All modules of the package, in this process, which has loaded recipes by their path and by their name."""
    configs.load(str(ROOT / "configs/octic_h.py:quicktest"))
    for module in pkgutil.walk_packages(equivit.__path__, "equivit."):
        importlib.import_module(module.name)
    names: dict[pathlib.Path, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = pathlib.Path(getattr(module, "__file__", None) or "/").resolve()
        if (
            file.is_relative_to(ROOT)
            and not file.is_relative_to(pathlib.Path(sys.prefix).resolve())
            and name != "__main__"
        ):
            assert names.setdefault(file, name) == name
    assert names[ROOT / "configs/octic_h.py"] == "equivit.configs.octic_h"


@pytest.mark.parametrize("name", LINKS)
def test_the_folder_of_a_clone_is_not_a_second_package(name):
    with pytest.raises(ImportError, match=f"import equivit.{name}, not {name}"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_all_imports_have_the_name_of_the_package():
    for folder in ("equivit", "kernels", "configs", "experiments", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) (kernels|configs)\b", path.read_text(), re.MULTILINE), path


def test_the_console_script_runs_commands(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["equivit", *arguments])
        status = equivit_jax.main()
        return status, capsys.readouterr()

    assert PROJECT["project"]["scripts"] == {"equivit": "equivit_jax:main"}
    assert run("--version") == (0, (f"equivit {equivit.__version__}\n", ""))
    status, (text, _) = run()
    assert status == 0 and re.findall(r"^  (\w+) +\S", text, re.MULTILINE) == list(program.COMMANDS)
    assert run("trian") == (2, ("", "error: there is no command 'trian'; the nearest is 'train'.\n"))
    assert "\nmodel.name = 'octic_vit_ti16'" in run("train", "--config=quickstart", "--show")[1].out
    with pytest.raises(SystemExit):
        run("train", "--help")
    assert capsys.readouterr().out.startswith("usage: equivit train ")


def test_another_project_of_the_name_is_reported(monkeypatch, capsys):
    """It comes first on the path of the console script, or lies in the same folder of an environment."""
    monkeypatch.delattr(equivit, "DISTRIBUTION")
    assert equivit_jax.main() == 1
    assert f"the package `equivit` at {equivit.__file__} is another project" in capsys.readouterr().err
    with pytest.raises(ImportError, match="is another project"):
        importlib.reload(importlib.import_module("equivit.layers"))


def test_the_citation_has_the_version():
    assert f"\nversion: {equivit.__version__}\n" in (ROOT / "CITATION.cff").read_text()
