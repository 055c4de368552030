import ast
import functools
import json
import math
import os
import re
import sys

import jax
import pytest

from equivit import train
from equivit.errors import is_number
from equivit.objectives.registry import OBJECTIVES
from equivit.training import config as configs
from equivit.training import loop
from equivit.training.run import processes

CONFIG = "tests/training/run_config.py"


def valid(**changes):
    """The defaults with a length, changed at dotted keys."""
    config = configs.get_base()
    config.steps = changes.pop("steps", 10)
    for key, value in changes.items():
        *sections, last = key.split("__")
        here = config
        for section in sections:
            here = here[section]
        here[last] = value
    return config


def test_the_defaults_need_only_a_length():
    configs.validate(valid())
    with pytest.raises(ValueError, match="set exactly one"):
        configs.validate(configs.get_base())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(step=1), "config.step: no such key; the nearest is 'steps'"),
        (dict(data__augment__flips=1), "config.data.augment.flips: no such key; the nearest is 'flip'"),
        (
            dict(optimizer__name="lamp"),
            "config.optimizer.name='lamp' is not one of lamb, lars, lars_optax, adamw, sgd; the nearest",
        ),
        (dict(data__source="digit"), "config.data.source='digit' is not one of .*; the nearest is 'digits'"),
        (dict(data__eval_split=""), "config.data.eval_split='' must be the name of a split, such as 'test'"),
        (dict(data__augment__flip=1.5), r"config.data.augment.flip=1.5 must be in \[0, 1\]"),
        (dict(schedule__lr=-1.0), "config.schedule.lr=-1.0 must be positive"),
        (dict(schedule__lr=float("nan")), "config.schedule.lr=nan must be positive"),
        (dict(batch_size=0), "config.batch_size=0 must be a positive whole number"),
        (dict(steps=2.5), "config.steps=2.5 must be a positive whole number, or None"),
        (dict(data__image_size=(16, 0)), "config.data.image_size=.* must be .height, width."),
        (dict(data__std=(0.2,)), "config.data.mean=.* and config.data.std=.* must have one entry per channel"),
        (dict(data__std=(0.2, 0.2, 0.0)), r"config.data.std=0.0 must be in \(0, 1\]"),
        (dict(data__crop_ratio=1.5), r"config.data.crop_ratio=1.5 must be in \(0, 1\]"),
        (dict(precision="bfloat6"), "config.precision='bfloat6' is not one of .*; the nearest is 'bfloat16'"),
        (dict(optimizer__weight_decay_end=-1.0), "weight_decay_end=-1.0 must be zero or more, or None"),
        (dict(checkpoint__keep=0), "config.checkpoint.keep=0 must be a positive whole number"),
        (dict(evaluation__severities=(3, 6)), "config.evaluation.severities=6 is not one of 1, 2, 3, 4, 5"),
        (dict(evaluation__sar__rho=-1.0), "config.evaluation.sar.rho=-1.0 must be zero or more"),
        (dict(optimizer__betas=(0.9, 1.0)), r"config.optimizer.betas=\(0.9, 1.0\) must be two numbers in \[0, 1\)"),
        (dict(optimizer__accumulation=3), "config.batch_size=128 must be divisible by optimizer.accumulation=3; .*126"),
        (dict(objective__label_smoothing=0.1, objective__mixup=0.8), "makes every target 1"),
        (dict(objective__ema=1.0), "config.objective.ema=1.0 must be a decay"),
        (dict(objective__mix_groups=0), "config.objective.mix_groups=0 must be a positive whole number"),
        (dict(objective__mixup=0.8, objective__mix_groups=3), "mix_groups=3 must divide the batch of 128 .* is 2"),
        (dict(epochs=3), "set exactly one"),
        (dict(schedule__warmup_steps=1, schedule__warmup_epochs=1), "warmup_epochs and warmup_steps are both set"),
        (dict(schedule__lr=5e-6), "config.schedule.min_lr=1e-05 must not exceed lr=5e-06, as .* to at most 5e-06"),
        (dict(schedule__lr=5e-6, schedule__name="poly"), "config.schedule.min_lr=1e-05 must not exceed lr=5e-06"),
        (dict(mesh__data=0), "config.mesh.data=0 must be positive, or -1"),
    ],
)
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        configs.validate(valid(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_number_is_checked(objective):
    base = configs.get_base(objective)
    base.steps = 10
    numbers = {key: value for key, value in configs.flat(base).items() if is_number(value) or _is_tuple(value)}
    assert len(numbers) > 30
    for key, value in numbers.items():
        config = base.copy_and_resolve_references()
        *sections, last = key.split(".")
        here = functools.reduce(lambda section, name: section[name], sections, config)
        with here.ignore_type():
            here[last] = (math.nan, *value[1:]) if _is_tuple(value) else math.nan
        with pytest.raises(ValueError, match=f"{last}=.*nan"):
            configs.validate(config)


def _is_tuple(value):
    return isinstance(value, tuple) and len(value) > 0 and is_number(value[0])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.source=npz:file.npz", "source", "npz:file.npz"),
        ("data.image_size=(8, 16)", "image_size", (8, 16)),
        ("data.image_size=[8, 16]", "image_size", (8, 16)),
        ("data.train_examples=100", "train_examples", 100),
        ("data.train_examples=none", "train_examples", None),
        ("data.crop_ratio=1", "crop_ratio", 1.0),
    ],
)
def test_overrides(override, key, value):
    assert configs.load(CONFIG, [override]).data[key] == value


@pytest.mark.parametrize(
    ("override", "value"),
    [("epochs=0.5", 0.5), ("schedule.warmup_epochs=2.5", 2.5), ("optimizer.weight_decay=1", 1.0)],
)
def test_a_whole_number_in_a_config_does_not_bind_its_key_to_them(override, value):
    found = configs.flat(configs.load("configs/cifar.py:10,plain", [override]))[override.partition("=")[0]]
    assert found == value and isinstance(found, float)


def test_words_and_numbers_with_commas():
    config = configs.load("configs/adaptive_cifar.py", ["evaluation.shift.ranges=full,6"])
    assert config.evaluation.shift.ranges == ("full", 6)


@pytest.mark.parametrize("mode", ["adaptive", "swin_t"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("token,merge", ("token", "merge")), ("window", ("window",)), ("True", True), ("token,pool", "token,pool")],
)
def test_words_with_commas_are_a_tuple_where_it_is_allowed(mode, value, expected):
    """Other text is left for the check of the model to name."""
    config = configs.load(f"configs/adaptive_cifar.py:{mode}", [f"model.adaptive={value}"])
    assert config.model.adaptive == expected


def test_the_model_section_takes_new_keys():
    assert configs.load(CONFIG, ["model.registers=4"]).model.registers == 4


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.remat=none", "none"),
        ("data.augment.crop=none", "none"),  # whose default is another word
        ("data.eval_split=none", "none"),  # any word
        ("data.corruption=none", None),  # may be None, and has no such word
        ("init=none", None),  # may be None, or any word
        ("model.pool=none", None),  # the family chooses
    ],
)
def test_none_is_a_word_only_where_it_is_one_and_none_is_not_allowed(override, value):
    config = configs.load(CONFIG, ["model.name=jumbo_vit_ti16", override])
    assert configs.flat(config)[override.partition("=")[0]] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sourc=digits", "--config.data.sourc: no key 'sourc'; the nearest is 'source'"),
        ("dat.source=digits", "--config.dat.source: no key 'dat'; the nearest is 'data'"),
        ("seed.x=1", "'seed' is a value, not a section"),
        ("batch_size=many", "config.batch_size='many' must be a positive whole number"),
        ("batch_size", "give a value"),
        ("data=3", "--config.data: this is a section"),
    ],
)
def test_wrong_overrides_are_refused(override, message):
    with pytest.raises(ValueError, match=message) as error:
        configs.load(CONFIG, [override])
    assert "\n" not in str(error.value)


def test_a_config_survives_its_file(tmp_path):
    config = configs.load(CONFIG, ["data.image_size=(8, 16)"])
    (tmp_path / "config.json").write_text(configs.to_json(config))
    again = configs.from_json(tmp_path / "config.json")
    assert configs.differences(config, again) == []
    assert again.data.image_size == (8, 16)
    assert configs.differences(config, configs.load(CONFIG, ["seed=1"])) == ["data.image_size", "seed"]


def test_what_another_version_knows_is_kept(tmp_path):
    stored = configs.plain(configs.load(CONFIG))
    stored["later"], stored["data"]["later"] = {"x": 1}, {"y": [2]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    found = configs.flat(configs.from_json(tmp_path / "config.json"))
    assert found["later.x"] == 1 and found["data.later.y"] == [2]


def test_a_rate_may_end_where_it_begins_and_a_constant_one_has_no_end():
    configs.validate(valid(schedule__lr=1e-5))
    configs.validate(valid(schedule__lr=5e-6, schedule__name="constant"))


def test_show_prints_every_key_as_an_override(capsys):
    changes = ["data.image_size=(8, 16)", "data.source=npz:absent.npz", "model.registers=4", "epochs=3", "steps=None"]
    assert train.main([f"--config={CONFIG}", *(f"--config.{change}" for change in changes), "--show"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    shown = dict(line.partition("#")[0].strip().split(" = ", 1) for line in lines)
    config = configs.load(CONFIG, changes)
    assert {key: ast.literal_eval(value) for key, value in shown.items()} == configs.flat(config)
    assert "data.image_size = (8, 16)".ljust(52) + "# default: (32, 32)" in lines
    strings = {key: value.strip("'") for key, value in shown.items()}  # as a shell does
    del strings["objective.name"]  # which decides the keys
    again = configs.load(CONFIG, [f"{key}={value}" for key, value in strings.items()])
    assert configs.differences(config, again) == []


def test_a_recipe_has_a_name_and_a_file(tmp_path, monkeypatch):
    by_file = configs.load(str(configs.RECIPES / "octic_h.py:I8"))
    monkeypatch.chdir(tmp_path)
    assert configs.differences(by_file, configs.load("octic_h:I8")) == []


def test_a_file_imports_recipes_and_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "constants_beside_it.py").write_text("BATCH = 64")
    (tmp_path / "own.py").write_text(OWN)
    config = configs.load(f"{tmp_path / 'own.py'}:D8")
    assert config.batch_size == 64 and config.model.family == "D8"


def test_a_file_whose_function_returns_nothing_is_named(tmp_path):
    (tmp_path / "own.py").write_text("def get_config():\n    pass\n")
    with pytest.raises(ValueError, match=r"own.py' must define get_config\(mode\), which returns the configuration"):
        configs.load(str(tmp_path / "own.py"))


OWN = """
from constants_beside_it import BATCH
from equivit.configs import octic_h


def get_config(mode):
    config = octic_h.get_config(mode)
    config.batch_size = BATCH
    return config
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=tests/training/run_confg.py"], "there is no file .* the nearest is 'tests/training/run_config.py'"),
        (["--config=README.md"], "'README.md' must be a Python file"),
        (["--config=octic_g:H8"], "--config='octic_g' is not one of .*; the nearest is 'octic_h'"),
        (["--config=recipes"], "--config='recipes' is not one of "),
        (["--config=nowhere/octic_h.py:H8"], "there is no file .*; the recipe that comes with equivit is octic_h"),
        (["--config=tests/drawing.py"], r"'tests/drawing.py' must define get_config\(mode\)"),
        ([f"--config={CONFIG}", "--workdr=x"], "unknown argument '--workdr'; the nearest is '--workdir'"),
        ([f"--config={CONFIG}", "--config.model.name=octic_vit_ti61"], "octic_vit_ti16"),
        ([f"--config={CONFIG}", "--config.model.wdth=3"], "width"),
        ([f"--config={CONFIG}", "--config.data.image_size=(16, 17)"], "17"),
        ([f"--config={CONFIG}", "--config.objective.name=supervise"], "the nearest is 'supervised'"),
        (
            [f"--config={CONFIG}", "--config.data.mean=(0.5, 0.5)", "--config.data.std=(1.0, 1.0)"],
            "must hold 1 numbers",
        ),
        ([f"--config={CONFIG}", "--seeds=a"], "--seeds=a: give integers"),
        ([f"--config={CONFIG}:processes", "--config.mesh.fsdp=3"], "fsdp=3 do not multiply"),
    ],
)
def test_commands_fail_in_one_line(arguments, message, tmp_path, capsys):
    assert train.main([*arguments, f"--workdir={tmp_path}"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert re.search(message, lines[0])


@pytest.mark.parametrize("show", [False, True])
def test_devices_are_prepared_before_a_config_may_load_weights(tmp_path, monkeypatch, show):
    happened = []

    def load(*args):
        happened.append(os.environ["XLA_FLAGS"].strip())
        raise ValueError

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(processes, "join", lambda asked: happened.append(asked))
    monkeypatch.setattr(jax.config, "update", lambda *args: happened.append(args))
    monkeypatch.setattr(configs, "load", load)
    arguments = [f"--config={CONFIG}", f"--workdir={tmp_path}", "--deterministic", "--distributed"]
    assert train.main(arguments + ["--show"] * show) == 1
    dispatch = ("jax_cpu_enable_async_dispatch", False)
    assert happened == ([""] if show else [True, dispatch, "--xla_gpu_deterministic_ops=true"])


def test_a_missing_workdir_is_refused(capsys):
    assert train.main([f"--config={CONFIG}"]) == 1
    assert capsys.readouterr().err == "error: --workdir is missing: give the directory of the run, --workdir=DIR.\n"


def test_aggregate():
    reports = {3: {"step": 5, "eval/accuracy": 0.5, "of_another_version": 1}, 7: {"step": 5, "eval/accuracy": 0.7}}
    found = train.aggregate(reports)
    figure = found["eval/accuracy"]
    assert "of_another_version" not in found
    assert figure["mean"] == pytest.approx(0.6) and figure["spread"] == pytest.approx(0.02**0.5)
    assert figure["values"] == [0.5, 0.7]


def test_several_seeds(tmp_path, capsys, monkeypatch):
    """A seed that diverges ends no other, and a finished one is not evaluated again."""
    trained = []

    def run(config, workdir):
        trained.append(config.seed)
        if config.seed in bad:
            raise loop.NotFiniteError("the loss was not finite")
        report = {"step": 2, "figure": float(config.seed)}
        workdir.mkdir(exist_ok=True)
        (workdir / "config.json").write_text(configs.to_json(config))
        (workdir / "report.json").write_text(json.dumps(report))
        return report

    monkeypatch.setattr(train, "train", run)
    arguments, bad = [f"--config={CONFIG}", f"--workdir={tmp_path}", "--seeds=0,3,5"], [3]
    assert train.main(arguments) == 1
    report, said = json.loads((tmp_path / "report.json").read_text()), capsys.readouterr()
    assert report["seeds"] == [0, 5] and report["figure"]["values"] == [0, 5] and report["figure"]["mean"] == 2.5
    assert said.err.startswith("error: 1 of 3 runs failed: seed_3; ") and "seed_3 failed: the loss" in said.out
    bad.clear()
    assert train.main(arguments) == 0
    assert trained == [0, 3, 5, 3] and json.loads((tmp_path / "report.json").read_text())["seeds"] == [0, 3, 5]
    said = capsys.readouterr().out
    assert "Run 1 of 3: seed_0 is finished." in said and str(tmp_path / "report.json") in said


SUPERVISED = b'{"objective": {"name": "supervised"}, "model": '


@pytest.mark.parametrize(
    "left",
    [
        *(b'{"seed": 0, "steps": 3, "obj', b"", b"{}", b"null", b"[1, 2]", b"\xff\xfe{}", b"[" * 100_000),
        SUPERVISED + b"null}",
        SUPERVISED + b'{"name": "vit_ti16"}, "steps": "x"}',
        SUPERVISED + b'{"name": "vit_ti16"}, "steps": 3, "data": {"void": [null]}}',
        SUPERVISED + b'{"name": "a\\nb"}, "steps": 3}',
    ],
)
def test_a_configuration_that_a_crash_has_cut_is_one_line_that_names_the_file(tmp_path, left):
    path = tmp_path / "config.json"
    path.write_bytes(left)
    with pytest.raises(ValueError, match=r"config.json is not the configuration of a run .*Move it away") as error:
        configs.from_json(path)
    assert "\n" not in str(error.value)
