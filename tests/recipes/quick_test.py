"""Every recipe's quick mode runs two steps, and leaves what a run leaves.  On one device (see the Makefile)."""

import json
import math
import pathlib

import jax
import pytest

from equivit import train
from equivit.data import loader
from equivit.evaluation import figures
from equivit.models import zoo
from equivit.training import build, sharding
from equivit.training import config as configs

ROOT = pathlib.Path(__file__).parents[2] / "configs"
PICTURES = {"learning_curves.png", "patch_filters.png"}
# Others with other sizes, octic_h.py, adaptive_cifar.py and segment.py, or the notebook on DINOv2: their step is
# lowered, and not run.
LOWERED = {"octic_ablations.py": "", "adaptive_imagenet.py": "adaptive,"}
LOWERED |= {"adaptive_ade20k.py": "adaptive,unpool,", "dinov2.py": "", "dinobloom.py": "", "depthwise.py": "gated,"}
# Baselines of Jumbo: the quick test that runs has a Jumbo token.
BASELINES = [f"{name}," for name in ("efficientvit_b1", "shvit_s1", "mobilenetv4_hybrid_medium", "bixt_ti_p16")]
DRAWN = "octic_h.py"  # what pictures show is for tests/evaluation/figures_test.py; one recipe has them drawn


# A sweep has a configuration and a command of its own: tests/training/sweep_test.py; depthwise_test.py runs stage 2.
OTHERS = ("__init__.py", "recipes.py", "timeseries.py", *LOWERED)
NAMES = {path.name for path in ROOT.glob("*.py")} - set(OTHERS)
RUN = sorted(NAMES, key=lambda name: (name != "linear_probe.py", name))  # the quick part has the first, a short one
MORE = [("deit3.py", "L,H8,"), *(("jumbo_in1k.py", words) for words in BASELINES)]


@pytest.mark.parametrize(("name", "words"), [*LOWERED.items(), *MORE])
def test_quicktest_lowers(name, words):
    config = configs.load(f"{ROOT / name}:{words}quicktest")
    with config.unlocked():
        config.model.update(num_classes=config.model.get("num_classes", 1000), in_channels=3)
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        objective = build.make_objective(config)
        entries = dict(entries=objective.entries, transform=objective.transform_of(config))
        batch = loader.shapes(config.data, config.batch_size, channels=3, **entries)
        teachers = {"teacher": zoo.abstract("vit_pico16", num_classes=10)} if "teacher" in config.objective else {}
        build.make_program(config, mesh, total=2, per_epoch=1, teachers=teachers).lower(batch)


@pytest.mark.quick
@pytest.mark.parametrize("name", RUN)
def test_quicktest_runs(name, tmp_path, monkeypatch):
    config = configs.load(f"{ROOT / name}:quicktest")
    with config.unlocked():
        config.batch_size = 24 if name != "quickstart.py" else 64
        config.data.train_examples = 48 if name != "quickstart.py" else 128
        # Saved at the end alone, however slow the machine is; tests/training proves that runs resume.
        config.checkpoint.update(every_steps=None, every_seconds=None)
        if config.objective.get("token_drop_phases"):
            config.objective.token_drop_phases = 1  # each phase is a program; tests/objectives has several
        if "orientation" in (config.evaluation.suite or ()) and name != "octic_h.py":
            config.evaluation.suite = ("accuracy",)  # the protocol takes longest, and is the same for every recipe
    if name != DRAWN:
        for draw in ("learning_curves", "patch_filters", "label_maps"):
            monkeypatch.setattr(figures, draw, lambda *given: [a.touch() for a in given if isinstance(a, pathlib.Path)])
    report = train.train(config, tmp_path)
    assert report["step"] == 2
    if name == "mae.py":
        assert 0 < report["eval/reconstruction/loss"] < 10
    else:
        figure = {"segment.py": "segmentation/miou", "octify.py": "knn/top1"}.get(name, "accuracy/top1")
        assert 0 <= report[f"eval/{figure}"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    more = {"segmentation.png"} if name == "segment.py" else set()
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES | more
    assert all((path.stat().st_size > 0) == (name == DRAWN) for path in tmp_path.glob("*.png"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
