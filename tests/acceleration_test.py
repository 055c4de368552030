"""`equivit.accelerate`: every stage in order, each done once, and what is refused before the first."""

import dataclasses
import json
import shutil
import types

import jax
import pytest
from flax import nnx

from equivit import accelerate, files, onnx_files
from equivit.acceleration import plan, report, stages
from equivit.depthwise import replacement
from equivit.models import saved, zoo

CONFIG = "configs/depthwise.py:in1k,quicktest"
SIZE = ["data.image_size=(16,32)", "data.eval_crop=squash"]


def model(**fields):
    """A tiny ViT with a class token and random parameters."""
    tiny = dict(width=16, depth=3, num_heads=2, patch_size=8, image_size=(16, 16), num_classes=10)
    return jax.jit(lambda: zoo.create("vit_ti16", rngs=nnx.Rngs(params=1), **{**tiny, **fields}))()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the model is saved; one that reads patches alone, so that it has a head without training."""
    found = tmp_path_factory.mktemp("acceleration")
    saved.save(found / "model", model(class_token=False, pool="mean"))
    return found


def run(place, *more, blocks=1, config=CONFIG, workdir="fitted", source="model"):
    arguments = [f"--input={place / source}", f"--config={config}", f"--blocks={blocks}", "--images=12"]
    arguments += [f"--workdir={place / workdir}", *(f"--config.{key}" for key in SIZE)]
    return accelerate.main([*arguments, *more])


@pytest.fixture(scope="module")
def fitted(place):
    """The report of --fit_only, which trains nothing."""
    pytest.importorskip("jax2onnx", reason="make install-export")
    assert run(place, "--fit_only", "--debug", blocks=2) == 0
    return json.loads((place / "fitted" / "report.json").read_text())


@pytest.mark.slow
def test_the_report_tells_before_and_after(place, fitted):
    assert len(fitted["blocks"]) == 2 and set(fitted["blocks"]) < {0, 1, 2}
    highest = next(score for block, score in enumerate(fitted["sigma"]) if block not in fitted["blocks"])
    assert all(fitted["sigma"][block] <= highest for block in fitted["blocks"])
    assert fitted["metric"]["name"] == "accuracy/top1"
    for name in ("metric", "milliseconds", "bytes"):
        assert {"before", "after"} <= fitted[name].keys()
    assert fitted["bytes"]["after"] < fitted["bytes"]["before"]  # queries and keys are gone
    assert all(0 <= error < 1 for error in fitted["fits"].values())  # below the attention's own squares
    found = saved.load(place / "fitted" / "fitted")
    assert [one.block for one in found.config.replaced] == fitted["blocks"]
    page = (place / "fitted" / "report.md").read_text()
    assert "| accuracy/top1, % |" in page and "(sigma.png)" in page
    assert (place / "fitted" / "sigma.png").stat().st_size > 0


def test_started_again_it_does_nothing_twice(place, fitted, monkeypatch):
    def never(*_, **__):
        raise AssertionError("done already")

    for module, name in ((stages.fit, "fit"), (stages.selection, "moments"), (stages.export, "write")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(stages.runner, "evaluate", never)
    monkeypatch.setattr(stages.profile, "profile", never)
    assert run(place, "--fit_only", blocks=2) == 0
    assert json.loads((place / "fitted" / "report.json").read_text()) == fitted


def test_both_stages_are_trained_in_order(place, monkeypatch):
    """Training itself is tested elsewhere; here it gives back what it begins with."""
    begun = []

    def trained(config, place, init):
        begun.append((place.name, init.name, config))
        place.mkdir(parents=True)
        (place / "report.json").write_text(json.dumps({"eval/accuracy/top1": 0.1 * len(begun)}))
        return replacement.reconfigure(saved.load(init), num_classes=10)[0]

    monkeypatch.setattr(stages, "_trained", trained)
    monkeypatch.setattr(stages, "_timed", lambda *_: ((2.0, 1.0), (20, 10), "a clock"))
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    saved.save(place / "with_class_token", model(registers=1))
    assert run(place, "--debug", source="with_class_token", workdir="both") == 0
    (one, start, first), (two, fits, second) = begun
    assert (one, start, two, fits) == ("stage1", "start", "stage2", "fitted")
    assert not saved.load(place / "both" / "start").config.prefix
    found = json.loads((place / "both" / "report.json").read_text())
    assert [entry[0] for entry in second.model.replaced] == found["blocks"] and not first.model.get("replaced")
    assert found["metric"] == {"name": "accuracy/top1", "before": 0.1, "after": 0.2}
    assert found["milliseconds"] == {"before": 2.0, "after": 1.0}


def test_a_stage_has_the_model_of_the_weights_and_the_recipe_of_the_config(place):
    changes = ("model.drop_path=0.25", "steps=None", "epochs=9", "batch_size=6", *SIZE)
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), changes, 1, place)
    first, second = made.config("stage1"), made.config("stage2", (2,))
    assert (first.epochs, first.batch_size, second.epochs, second.batch_size) == (9, 6, 4, 3)
    for config in (first, second):
        assert (config.model.width, config.model.patch_size, config.model.drop_path) == (16, (8, 8), 0.25)
        assert config.model.image_size == (16, 32) and not config.model.class_token
        assert config.model.num_classes == 10  # of the recipe: the data decide
    built = [zoo.configuration(**{**config.model, "num_classes": 10}) for config in (first, second)]
    assert [tuple(one) for one in built[1].replaced] == [(2, "dw", 3, None, "released")] and not built[0].replaced


KNN = ["--config.evaluation.suite=knn", "--config.evaluation.knn.ks=(1000,)"]
REFUSED = {
    "--blocks=4 must lie between 1 and 3": dict(blocks=4),
    "leave out stage2; stage1 and stage2 are both trained": dict(config=f"{CONFIG},stage2"),
    "already has replaced blocks": dict(source="replaced"),
    "--num_heads is only for --weights": dict(more=["--num_heads=3"]),
    "is neither a run nor a saved model": dict(source="nothing"),
    "--images=1 must be a whole number, 2 or more; the nearest is 2": dict(more=["--images=1"]),
    "there is no directory": dict(more=["--config.data.source=folder:nowhere"]),
    "image_size 16x30: the width 30 is not divisible": dict(more=["--config.data.image_size=(16,30)"]),
    "model.replaced: --blocks sets their number": dict(more=["--config.model.replaced=((0,),)"]),
    "config.model.width=32: the weights determine this; leave it out": dict(more=["--config.model.width=32"]),
    "config.model.name='jumbo_vit_s16': the weights determine": dict(more=["--config.model.name=jumbo_vit_s16"]),
    "config.init='nothing': the weights determine this": dict(more=["--config.init=nothing"]),
    "stage1, of 2 steps: optimizer.freeze: 'nope.*' matches no parameter": dict(
        more=["--config.optimizer.freeze=nope.*"]
    ),
    "stage2, of 1 steps: schedule: a warm-up of 1 steps": dict(more=["--config.schedule.warmup_steps=1"]),
    "has no stage1 and stage2; use configs/depthwise.py": dict(config="configs/quickstart.py:plain"),
    "config mode='voc' is not one of coco": dict(config="configs/depthwise.py:voc"),
    "k=1000 must be in 1..16": dict(more=["--fit_only", *KNN]),
    "no key 'learning_rate'": dict(more=["--config.learning_rate=1"]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_anything_is_written(message, place, monkeypatch, capsys):
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    if REFUSED[message].get("source") == "replaced":
        saved.save(place / "replaced", replacement.replace(saved.load(place / "model"), {0: None}))
    options = dict(REFUSED[message])
    assert run(place, *options.pop("more", ()), workdir="never", **options) == 1
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
    assert not (place / "never").exists()


def test_a_directory_begun_otherwise_is_refused(place, monkeypatch, capsys):
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    monkeypatch.setattr(stages, "run", lambda made: types.SimpleNamespace())
    monkeypatch.setattr(report, "write", lambda *_: "a report")
    assert run(place, workdir="begun") == 0 and run(place, workdir="begun") == 0
    assert run(place, "--fit_only", workdir="begun") == 1
    assert "was begun with fit_only=False, not True" in capsys.readouterr().err
    for damaged in ("null", "[3]", '{"source":'):
        (place / "begun" / plan.ARGUMENTS).write_text(damaged)
        assert run(place, workdir="begun") == 1
        assert "begun/arguments.json is damaged" in capsys.readouterr().err
    (place / "run").mkdir()
    (place / "run" / "config.json").touch()
    assert run(place, workdir="run") == 1
    assert "this is the directory of a training run; give another" in capsys.readouterr().err
    assert run(place, workdir="begun/arguments.json") == 1
    assert "begun/arguments.json: this path or a parent is a file; give" in capsys.readouterr().err


def test_a_model_without_a_head_has_no_figure_unless_one_is_named(place):
    """By default it would be one of its features, which nobody has asked for and no report of a run has."""
    made = plan.Plan(model(class_token=False, pool="mean", num_classes=None), *CONFIG.split(":"), tuple(SIZE), 1, place)
    config = made.config("stage1").unlock()
    assert stages._metric(made, config, made.model, made.model) is None
    config.evaluation.suite = ("accuracy", "patch_knn", "knn")
    assert plan.protocol(config, made.model) == "patch_knn"


def test_other_weights_under_the_same_path_are_refused(place, monkeypatch, capsys):
    """Such as those of a later step of a run; directories of earlier versions have no digest."""
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    monkeypatch.setattr(stages, "run", lambda made: made)
    monkeypatch.setattr(report, "write", lambda workdir, found: workdir)
    first, other = (model(class_token=False, pool="mean") for _ in range(2))
    other.head.bias[...] += 1
    assert plan.fingerprint(first) == plan.fingerprint(model(class_token=False, pool="mean")) != plan.fingerprint(other)
    saved.save(place / "changing", first)
    assert run(place, source="changing", workdir="of_one") == 0
    saved.save(place / "changing", other)
    assert run(place, source="changing", workdir="of_one") == 1
    message = f"of_one was begun with other weights than {place}/changing contains now; give another --workdir."
    assert message in capsys.readouterr().err
    arguments = place / "of_one" / "arguments.json"
    before = json.loads(arguments.read_text())
    assert len(before.pop("weights")) == 64
    arguments.write_text(json.dumps(before))
    assert run(place, source="changing", workdir="of_one") == 0


@pytest.mark.parametrize("damaged", ["parameters.safetensors", "model.json"])
def test_a_damaged_model_of_a_stage_is_named_and_made_again(tmp_path, damaged):
    made = []

    def make():
        made.append(model())
        return made[-1]

    beside = tmp_path / "fits.json"
    beside.write_text("{}")
    stages._saved(tmp_path / "fitted", make, beside=beside)
    file = tmp_path / "fitted" / damaged
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"damaged.*; remove {tmp_path}/fitted to create it again\.$"):
        stages._saved(tmp_path / "fitted", make, beside=beside)
    shutil.rmtree(tmp_path / "fitted")
    stages._saved(tmp_path / "fitted", make, beside=beside)
    stages._saved(tmp_path / "fitted", make, beside=beside)
    assert len(made) == 2
    beside.unlink()
    stages._saved(tmp_path / "fitted", make, beside=beside)
    assert len(made) == 3


def test_as_many_images_are_told_as_there_are(place, monkeypatch, capsys):
    """A training set of 16, though 1000 are asked for."""
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), tuple(SIZE), 1, place / "told")

    def stopped(*_):
        raise InterruptedError("before anything is computed")

    monkeypatch.setattr(stages.selection, "moments", stopped)
    monkeypatch.setattr(stages.fit, "fit", stopped)
    config = made.config("stage1")
    for stage, more in ((stages._sigma, ()), (stages._fitted, ((1,),))):
        with pytest.raises(InterruptedError):
            stage(made, config, made.model, *more)
        assert capsys.readouterr().out.endswith(" blocks, on 16 training images.\n")


def test_what_a_stage_left_is_whole_or_named(place):
    (place / "fits.json").write_text('{"blocks": [')
    (place / "sigma.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="fits.json is damaged .*; remove it to create it again"):
        files.read_json(place / "fits.json")
    (place / "fits.json").write_text('{"blocks": []}')
    with pytest.raises(ValueError, match="fits.json is damaged, it has no heads"):
        files.read_json(place / "fits.json", "blocks", "heads")
    with pytest.raises(ValueError, match=r"sigma.npz is damaged .*; remove it to create it again\.$"):
        report._maps(place / "sigma.npz")


def test_a_missing_library_is_named_at_once(place, monkeypatch, capsys):
    def missing(name):
        raise ValueError(f"{name} is not installed; {onnx_files.INSTALL} installs what ONNX files need.")

    monkeypatch.setattr(plan.onnx_files, "library", missing)
    assert run(place, workdir="never") == 1
    assert "make install-export" in capsys.readouterr().err and not (place / "never").exists()


def test_a_decoder_stays_when_its_backbone_changes():
    from equivit.models.segmenter import model as segmenter

    vit = model(class_token=False, pool="mean", num_classes=None)
    config = segmenter.SegmenterConfig(backbone=vit.config, num_classes=3, decoder="linear")
    before = config.build(nnx.Rngs(params=0))
    after = replacement.with_backbone(before, replacement.replace(vit, {1: None}))
    assert [one.block for one in after.config.backbone.replaced] == [1]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(before.decoder), nnx.state(after.decoder))
    assert all(jax.tree.leaves(same))


def test_hints_belong_to_what_a_directory_was_begun_with(tmp_path):
    """Also sizes, which are tuples here and lists in the file."""
    given = dict(weights="clip:a.pt", input=None, config=CONFIG, blocks=1, images=8, fit_only=False, workdir=tmp_path)
    hints = dict(num_heads=3, image_size=(16, 32), mlp="gelu", checkpoint_key="model")
    for _ in range(2):
        plan.claim(types.SimpleNamespace(**given, **hints), (), "a digest")
    for name, other in dict(num_heads=6, image_size=(16, 16), mlp="quick_gelu", checkpoint_key="ema").items():
        with pytest.raises(ValueError, match=f"was begun with {name}=.*; give that value, or another --workdir"):
            plan.claim(types.SimpleNamespace(**given, **(hints | {name: other})), (), "a digest")


def test_a_config_for_other_pixels_than_those_of_the_weights_is_refused(place):
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), (), 1, place)
    plan._check_pixels(made, "dinov2:weights.pth")
    with pytest.raises(ValueError, match="CLIP normalises .*names no CLIP backbone; add clip_b16 to its"):
        plan._check_pixels(made, "clip:weights.pt")
    plan._check_pixels(dataclasses.replace(made, mode="in1k,clip_b16"), "clip:weights.pt")
    plan._check_pixels(dataclasses.replace(made, changes=("data.mean=(0.5,)",)), "clip:weights.pt")
    with pytest.raises(ValueError, match="names a CLIP backbone; leave it out"):
        plan._check_pixels(dataclasses.replace(made, mode="in1k,clip_b16"), "mae:weights.pth")
