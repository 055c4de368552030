"""The command that runs the scripts."""

import ast
import json

from experiments import __main__ as command


def test_without_a_name_it_lists_all_scripts(capsys):
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(command.scripts()) and len(lines) > 40
    assert all(line.split(maxsplit=1)[1].endswith((".", "?")) for line in lines)


def test_every_script_takes_arguments():
    for name in command.scripts():
        tree = ast.parse((command.FOLDER / f"{name.replace('.', '/')}.py").read_text())
        (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        assert [argument.arg for argument in main.args.args] == ["arguments"], name


def test_an_unknown_name_has_the_nearest_one_beside_it(capsys):
    assert command.main(["tables.octic.scalin"]) == 1
    error = capsys.readouterr().err.strip()
    assert error == "error: there is no script tables.octic.scalin; nearest: tables.octic.scaling"


def test_it_runs_a_script_and_errors_are_one_line(tmp_path, capsys):
    output = tmp_path / "layers.json"
    assert command.main(["tables.depthwise.layers", f"--output={output}", "--entry=mine"]) == 0
    assert list(json.loads(output.read_text())) == ["mine"]
    capsys.readouterr()
    assert command.main(["tables.octic.invariants", str(tmp_path / "runs")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
