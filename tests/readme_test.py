"""README.md and docs/: their examples run, their commands parse, their links and pictures are there."""

import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from equivit import (
    accelerate,
    command,
    compare,
    convert,
    evaluate,
    export,
    predict,
    pretrained,
    profile,
    summarize,
    sweep,
    testing,
    train,
)
from equivit.configs import finetune_folder
from equivit.data import npz
from equivit.evaluation import summary
from equivit.models import zoo
from equivit.symmetry import __main__ as symmetry
from equivit.training import config as configs
from equivit.training import fine_tuning, sweep_config, sweep_grid
from experiments.__main__ import scripts

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHARED = ["flags", "studies/several_seeds"]  # flags of several experiments
SHARED += [f"tables/{name}" for name in ("finished_runs", "measuring")]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
SCRIPTS = scripts()
EXPERIMENTS = [f"experiments/{name}README.md" for name in ("", "tables/", "studies/", "benchmarks/")]
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS, *EXPERIMENTS, "configs/README.md", "colabs/README.md")
PROGRAMS = (accelerate, compare, convert, evaluate, export, predict, profile, summarize, sweep, symmetry, train)
COMMANDS = {module.__name__.removesuffix(".__main__"): module for module in PROGRAMS}
EXAMPLES = "\n".join((ROOT / page).read_text() for page in ("README.md", *DOCS))
BLOCKS = re.findall(r"^```python\n(.*?)^```", EXAMPLES, re.DOTALL | re.MULTILINE)


def commands(page: str, program: str) -> list[list[str]]:
    """The words after `python` wherever a page runs the program."""
    return [words_of(line)[1:] for line in lines(page, program)]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def lines(page: str, program: str) -> list[str]:
    """The commands of a page that run the program, in a block or between backticks.

    A line `equivit NAME ...` runs a command too.
    """
    text = (ROOT / page).read_text().replace("\\\n", " ")
    text = re.sub(r"^equivit (\w+)", r"python -m equivit.\1", text, flags=re.MULTILINE)
    found = re.findall(rf"python {program}[^`\n]*", text)  # a bare name, without arguments, is no command
    found = [line for line in found if not line.startswith("python -m") or " --" in line]
    return [line.rstrip('"') if line.count('"') % 2 else line for line in found]


def block(word: str) -> str:
    """The one example that has the word in it."""
    (found,) = (text for text in BLOCKS if word in text)
    return found


def run_alone(folder: pathlib.Path, example: str) -> str:
    """Run an example as users do, saved as a file in a folder of theirs, and return what it prints."""
    (folder / "example.py").write_text(example)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.fixture
def run(capfd):
    """`run(example)` runs an example here, with names of its own, and returns what it prints."""

    def run(example: str) -> str:
        capfd.readouterr()
        exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
        printed, errors = capfd.readouterr()
        assert not errors, errors
        return printed

    return run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory that has the configs alone."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def photo(path: pathlib.Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)).save(path)


def deit3(width: int) -> dict[str, np.ndarray]:
    """A random state dict with the names and shapes of the official DeiT III files, one block deep."""
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 196, width), "norm.weight": (width,), "norm.bias": (width,)}
    shapes |= {"patch_embed.proj.weight": (width, 3, 16, 16), "patch_embed.proj.bias": (width,)}
    shapes |= {"head.weight": (1000, width), "head.bias": (1000,)}
    sizes = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}
    for name, (rows, columns) in sizes.items():
        shapes[f"blocks.0.{name}.weight"] = (rows * width, columns * width)
        shapes[f"blocks.0.{name}.bias"] = (rows * width,)
    for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "gamma_1", "gamma_2"):
        shapes[f"blocks.0.{name}"] = (width,)
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def test_every_example_is_run_by_a_test():
    words = ["jnp.rot90", "Classifier", "logits.shape", "photo.jpg", "predict.load", "replacement.replace", "def blur"]
    words += ["reconfigure", "nnx.Optimizer", "to_linen", "randomise", "savez_compressed", 'Digits("test")']
    assert len(BLOCKS) == len(words) and all(map(block, words))


@pytest.mark.slow
def test_two_invariances(run):
    rotated, shifted = map(float, run(block("jnp.rot90")).split())
    assert rotated < 1e-5 and shifted == 0


def test_a_layer_in_your_own_model(run):
    printed = re.findall(r"-?\d+\.\d+(?:e-?\d+)?", run(block("Classifier")))
    upright, transposed = np.array(printed, float).reshape(2, 2, 3)
    np.testing.assert_allclose(transposed, upright, atol=1e-4)  # as printed


@pytest.mark.slow
def test_a_whole_model(run):
    example = block("logits.shape")
    assert run(example).strip() == re.search(r"print\(.*\)  # (.*)", example)[1]


def test_public_weights(run, folder):
    from tests.pretrained import torch_archive

    (name,) = re.findall(r'load\("timm", "(.*)"\)', block("photo.jpg"))
    assert f"/{name})" in README  # where to get it
    torch_archive.write(folder / name, {"model": deit3(192)})
    photo(folder / "photo.jpg", 0)
    assert len(re.findall(r"\d+", run(block("photo.jpg")))) == 5


@pytest.mark.slow
def test_your_own_images(run, folder, monkeypatch):
    """One step of the command, from a small file of the public one's layout and without pictures; then predictions."""
    from tests.pretrained import torch_archive

    for seed in range(10):
        photo(folder / f"photos/{('cats', 'dogs')[seed % 2]}/{seed}.jpg", seed)
    for name in "ab":
        photo(folder / f"more_photos/{name}.jpg", 0)
    torch_archive.write(folder / "deit_3_small_224_1k.pth", {"model": deit3(192)})
    words, *_ = commands("docs/how_to/own_images.md", "-m equivit.train")
    small = ["epochs=None", "steps=1", "batch_size=8", "data.image_size=(32,32)", "log.to=()"]
    small += ["evaluation.every_epochs=None"]
    monkeypatch.setattr(summary, "conclude", lambda *_, **__: {})
    assert train.main([*words[2:], *(f"--config.{change}" for change in small)]) == 0
    assert len((folder / "runs/photos/held_out.csv").read_text().splitlines()) == 3
    lines = run(block("predict.load")).splitlines()
    assert len(lines) == 2 and all(
        re.match(r"more_photos/[ab]\.jpg \('(cats|dogs)', '(cats|dogs)'\)", line) for line in lines
    )


def test_the_example_of_an_npz_file_makes_one(run, folder):
    for number, name in enumerate(["train/cats/a.png", "train/dogs/b.png", "train/dogs/c.png", "test/dogs/d.png"]):
        photo(folder / "photos" / name, number)
    run(block("savez_compressed"))
    train_part, test_part = (npz.Npz(str(folder / "photos.npz"), split, void=()) for split in ("train", "test"))
    assert train_part.classes == ("cats", "dogs") and train_part[0]["image"].shape == (96, 96, 3)
    assert [part[k]["label"] for part in (train_part, test_part) for k in range(len(part))] == [0, 1, 1, 1]


def test_attention_replaced_by_convolution(folder, monkeypatch):
    """With a small model in place of the public one, so in this process."""
    for i in range(3):
        photo(folder / f"photos/train/cats/{i}.jpg", i)
    small = zoo.abstract("dinov2_vit_b14", width=16, depth=8, num_heads=2, image_size=(56, 56), num_classes=None)
    small = testing.randomise(small, jax.random.key(0))
    monkeypatch.setattr(pretrained, "load", lambda source, file: {"dinov2_vitb14_pretrain.pth": small}[file])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block("replacement.replace"), "docs/models.md", "exec"), names)
    assert len(names["blocks"]) == 6 and names["model"].head.bias.shape == (1000,)
    assert [one.block for one in names["model"].config.replaced] == list(names["blocks"])


def test_public_weights_with_another_head_and_size(tmp_path, monkeypatch, capsys):
    from tests.pretrained import torch_archive

    example = block("reconfigure")
    (name,) = re.findall(r'load\("timm", "(.*)", num', example)
    torch_archive.write(tmp_path / name, {"model": deit3(192)})
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/how_to/public_weights.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == re.search(r"print\(.*\)  # (.*)", example)[1]


def test_a_layer_in_your_own_training_loop(capsys):
    """With a tenth of the steps."""
    exec(compile(block("nnx.Optimizer").replace("range(300)", "range(30)"), "docs/how_to/own_layer.md", "exec"), {})
    upright, turned = (float(text) for text in re.findall(r": ([\d.]+)%", capsys.readouterr().out))
    assert upright == turned > 25  # ten classes


def test_a_model_in_other_training_code(capsys):
    space: dict[str, Any] = {}
    exec(compile(block("to_linen"), "docs/how_to/own_layer.md", "exec"), space)
    trained, turned = capsys.readouterr().out.splitlines()
    first, last = map(float, trained.split())
    assert last < 0.9 * first and float(turned) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, nnx.state(space["trained"]), space["parameters"])


@pytest.mark.slow
def test_guarantees_on_a_random_model(capsys):
    exec(compile(block("randomise"), "docs/how_to/guarantees.md", "exec"), {})
    assert all(0 < float(line) < 1e-5 for line in capsys.readouterr().out.splitlines())


def test_digits_for_the_table_of_guarantees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block('Digits("test")'), "docs/how_to/guarantees.md", "exec"), {})
    files = list((tmp_path / "digits").glob("*.png"))
    with Image.open(files[0]) as image:
        assert len(files) == 100 and (image.size, image.mode) == ((8, 8), "L")


def test_assert_equivariant_on_your_own_function(tmp_path):
    gap, error = run_alone(tmp_path, block("def blur")).splitlines()[:2]
    assert float(gap) < 1e-5 and error.startswith("octic element 'r': the output deviates by ")


def without_files(config):
    """Complete a configuration without its weights and its data, which are not here."""
    config.init, config.data.source, config.model.name = None, "synthetic", "vit_ti16"
    completed(config)


completed = fine_tuning.complete


@pytest.mark.parametrize("page", PAGES)
def test_a_shell_passes_the_words_of_commands_on(page):
    """Parentheses, braces and spaces are quoted where they stand for themselves; ! is quoted by ' alone."""
    found = [line for name in COMMANDS for line in lines(page, f"-m {name}")]
    for line in found:
        assert "!" not in re.sub("'[^']*'", "", line), line
    script = "".join(f"printf '%s\\0' {line.partition(' #')[0]}; echo\n" for line in found)
    printed = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode()
    words = [text.removesuffix("\0").split("\0") for text in printed.splitlines()]
    assert words == [words_of(line) for line in found]


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page, monkeypatch):
    """Flags, configs, modes and keys of the commands exist; nothing is run."""
    monkeypatch.setattr(finetune_folder, "complete", without_files)
    for name, module in COMMANDS.items():
        for words in commands(page, f"-m {name}"):
            options, rest = module._parser().parse_known_args(words[2:])
            if name == "equivit.summarize" and options.model:
                command.changes(rest, module._parser(), "--model.")
                continue
            lists = [text.removeprefix("--sweep.") for text in rest if text.startswith("--sweep.")]
            rest = [text for text in rest if not text.startswith("--sweep.")]
            changes = command.changes(rest, module._parser())
            if getattr(options, "config", None):
                series = name == "equivit.sweep" and not lists
                schema = sweep_config.SCHEMA if series else configs.TRAINING
                recipe = str(ROOT / options.config) if "/" in options.config else options.config
                for values in sweep_grid.runs(lists).values():
                    configs.load(recipe, [*changes, *values], schema=schema)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_their_flags_are_there(page):
    for script in re.findall(r"python -m experiments ([\w.]*\w)", (ROOT / page).read_text()):
        assert script in SCRIPTS, f"{page}: there is no {script}"
    for _, _, script, *words in commands(page, "-m experiments "):
        text = (ROOT / f"experiments/{script.replace('.', '/')}.py").read_text()
        shared = "".join((ROOT / f"experiments/{name}.py").read_text() for name in SHARED)
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert f'"{flag}"' in text + shared, f"{page}: {script} has no {flag}"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_are_there(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else ()
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], f"{page}: {link}"


def test_it_is_short_and_its_pictures_are_small():
    assert len(README.splitlines()) <= 120 and "```python" in "\n".join(README.splitlines()[:40])
    sizes = [path.stat().st_size for path in (ROOT / "experiments/figures").iterdir()]
    assert sizes and max(sizes) < 150_000 and sum(sizes) < 600_000


@pytest.mark.parametrize("name", ["colabs", "configs", "docs", "equivit", "experiments", "kernels", "tests"])
def test_every_folder_says_what_it_is(name):
    if (ROOT / name / "README.md").is_file():
        assert len((ROOT / name / "README.md").read_text().splitlines()) >= 4
    else:
        tree = ast.parse((ROOT / name / "__init__.py").read_text())
        assert len((ast.get_docstring(tree) or "").splitlines()) >= 4
