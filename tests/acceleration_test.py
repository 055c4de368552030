"""`equivit.accelerate`: every stage in order, each done once, and what is refused before the first."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import accelerate, files, onnx_files, staged, testing
from equivit.acceleration import nearness, plan, report, stages
from equivit.depthwise import replacement
from equivit.models import saved, zoo
from equivit.trained_on import TrainedOn

CONFIG = "configs/depthwise.py:in1k,quicktest"
SIZE = ["data.image_size=(16,32)", "data.eval_crop=squash"]
DATA = TrainedOn(tuple("abcdefghij"), 12, dict(mean=(0.5,) * 3, std=(0.25,) * 3))
PIXELS = ("--config.data.mean=0.5,0.5,0.5", "--config.data.std=0.25,0.25,0.25")


def model(**fields):
    """A tiny ViT with a class token and random parameters."""
    tiny = dict(width=16, depth=3, num_heads=2, patch_size=8, image_size=(16, 16), num_classes=10)
    return testing.randomise(zoo.abstract("vit_ti16", **{**tiny, **fields}), jax.random.key(1))


def random_model():
    """A headless model of patches."""
    return model(class_token=False, pool="mean", num_classes=None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the model is saved; one that reads patches alone, so that it has a head without training."""
    found = tmp_path_factory.mktemp("acceleration")
    saved.save(found / "model", model(class_token=False, pool="mean"))
    return found


def run(place, *more, blocks=1, config=CONFIG, workdir="fitted", source="model"):
    arguments = [f"--input={place / source}", f"--config={config}", "--images=12", f"--workdir={place / workdir}"]
    arguments += [f"--config.{key}" for key in SIZE] + ([] if blocks is None else [f"--blocks={blocks}"])
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


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--heads=3"], ["--blocks=2", "--kind=ens_dw"]], ids=lambda how: how[-1])
def test_killed_in_each_stage_it_goes_on(place, how, monkeypatch):
    """And no stage that has ended is begun again."""
    pytest.importorskip("jax2onnx", reason="make install-export")
    begun = []

    def killed_at_first(module, name):
        real = getattr(module, name)

        def call(*arguments, **options):
            begun.append(name)
            if begun.count(name) == 1:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in ((stages.selection, "moments"), (stages.fit, "fit"), (stages.runner, "evaluate")):
        killed_at_first(module, name)
    killed_at_first(stages.export, "write")
    killed_at_first(stages.profile, "profile")
    workdir = f"killed{how[-1]}"
    assert [run(place, *how, "--fit_only", blocks=None, workdir=workdir) for _ in range(6)] == [130] * 5 + [0]
    numbers = {name: begun.count(name) for name in begun}
    assert numbers == dict(moments=2, fit=2, evaluate=3, write=3, profile=2)  # two models, the first one twice
    found = json.loads((place / workdir / "report.json").read_text())
    entries = saved.load(place / workdir / "fitted").config.replaced
    assert [one.block for one in entries] == found["blocks"] and {one.form for one in entries} == {"released"}
    if found["kind"] == "dw":
        assert sum(len(one.heads or (0, 1)) for one in entries) == 3
        assert found["heads"] == {str(one.block): list(one.heads or (0, 1)) for one in entries}
    else:
        assert [one.kind for one in entries] == ["ens_dw"] * 2 and found["heads"] is None


def test_both_stages_are_trained_in_order(place, monkeypatch):
    """Training itself is tested elsewhere; here it gives back what it begins with."""
    begun, named = [], []

    def trained(config, place, init):
        begun.append((place.name, init.name, config))
        found = replacement.reconfigure(saved.load(init), num_classes=10)[0]
        saved.save(place, found, DATA._replace(examples=3))
        (place / "report.json").write_text(json.dumps({"eval/accuracy/top1": 0.1 * len(begun)}))
        return found

    def timed(plan, size, classes, *models):
        named.append(classes)
        return {"float32": stages.Times((2.0, 1.0), (20, 10))}, "a clock"

    monkeypatch.setattr(staged, "trained", trained)
    monkeypatch.setattr(stages, "_timed", timed)
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    saved.save(place / "with_class_token", model(registers=1), DATA)
    assert run(place, "--debug", *PIXELS, source="with_class_token", workdir="both") == 0
    (one, start, first), (two, fits, second) = begun
    assert (one, start, two, fits) == ("stage1", "start", "stage2", "fitted")
    assert not saved.load(place / "both" / "start").config.prefix
    assert saved.trained_on(place / "both" / "start") == ((), None, DATA.images)  # its head read the class token
    assert saved.trained_on(place / "both" / "fitted") == DATA._replace(examples=3) and named == [DATA.classes]
    found = json.loads((place / "both" / "report.json").read_text())
    assert [entry[0] for entry in second.model.replaced] == found["blocks"] and not first.model.get("replaced")
    assert found["metric"] == {"name": "accuracy/top1", "before": 0.1, "after": 0.2}
    assert found["milliseconds"] == {"before": 2.0, "after": 1.0}


def test_without_training_the_classes_and_the_images_are_those_of_the_model(place, monkeypatch):
    seen = []
    vit, keys = model(class_token=False, pool="mean"), dict(kind="identity", start=None, fit_only=True, data=DATA)
    made = plan.Plan(vit, *CONFIG.split(":"), tuple(SIZE), 1, place / "named", **keys)
    scores = plan.selection.Sigma(np.zeros((3, 2)), np.zeros(3))
    monkeypatch.setattr(stages, "_sigma", lambda *_: scores)
    monkeypatch.setattr(stages, "_timed", lambda plan, size, classes, *_: seen.append(classes) or ({}, "a clock"))
    monkeypatch.setattr(
        stages.runner, "evaluate", lambda *_, classes: seen.append(classes) or {"accuracy": {"top1": 0.5}}
    )
    stages.run(made)
    assert seen == [DATA.classes] * 3
    assert saved.trained_on(place / "named" / "start") == saved.trained_on(place / "named" / "fitted") == DATA


def test_data_with_the_classes_in_another_order_are_refused(place, monkeypatch, capsys):
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    saved.save(place / "named_model", model(class_token=False, pool="mean"), DATA)
    arrays = {f"{split}_image": np.zeros((16, 16, 32, 3), np.uint8) for split in ("train", "test")}
    arrays |= {f"{split}_label": np.zeros(16, int) for split in ("train", "test")}
    np.savez(place / "data.npz", classes=np.array(DATA.classes[::-1]), **arrays)
    source = [f"--config.data.source=npz:{place}/data.npz", "--config.data.eval_split=test"]
    assert run(place, "--fit_only", *PIXELS, *source, source="named_model", workdir="never") == 1
    assert "class 0 is 'j', in the data of the model it is 'a' (they are in another order)" in capsys.readouterr().err


def test_a_stage_has_the_model_of_the_weights_and_the_recipe_of_the_config(place):
    changes = ("model.drop_path=0.25", "steps=None", "epochs=9", "batch_size=6", *SIZE)
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), changes, 1, place)
    first, second = made.config("stage1"), made.config("stage2", {2: None})
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
    "--heads=7 must lie between 1 and 6, the heads of this model": dict(blocks=None, more=["--heads=7"]),
    "--heads=2: --kind=ens_dw merges all heads of a block; take --blocks, or --kind=dw": dict(
        blocks=None, more=["--heads=2", "--kind=ens_dw"]
    ),
    "--kind='dv' is not one of conv, dw": dict(more=["--kind=dv"]),
    "--form='paper' is not one of released": dict(more=["--form=paper"]),
    "--order='least' is not one of lowest": dict(more=["--order=least"]),
    "start='projection' is not for kind='spvit', whose outputs are not linear": dict(
        more=["--kind=spvit", "--start=projection"]
    ),
    "start='blur', but kind='identity' has no taps; leave start out": dict(more=["--kind=identity", "--start=blur"]),
    "start='blurred' is not one of": dict(more=["--start=blurred"]),
    "model.replaced: --blocks or --heads sets their number": dict(more=["--config.model.replaced=((0,),)"]),
    "config.model.width=32: the weights determine this; leave it out": dict(more=["--config.model.width=32"]),
    "config.model.name='jumbo_vit_s16': the weights determine": dict(more=["--config.model.name=jumbo_vit_s16"]),
    "config.init='nothing': the weights determine this": dict(more=["--config.init=nothing"]),
    "stage1, of 2 steps: optimizer.freeze: 'nope.*' matches no parameter": dict(
        more=["--config.optimizer.freeze=nope.*"]
    ),
    "stage2, of 1 steps: config.schedule.warmup_steps=1": dict(more=["--config.schedule.warmup_steps=1"]),
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
        (place / "begun" / staged.ARGUMENTS).write_text(damaged)
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
    """A run may have a later step by now; or stages lie there whose weights nobody recorded."""
    monkeypatch.setattr(plan.onnx_files, "library", lambda name: None)
    monkeypatch.setattr(stages, "run", lambda made: made)
    monkeypatch.setattr(report, "write", lambda workdir, found: workdir)
    first, other = (model(class_token=False, pool="mean") for _ in range(2))
    other.head.bias[...] += 1
    assert (
        staged.fingerprint(first)
        == staged.fingerprint(model(class_token=False, pool="mean"))
        != staged.fingerprint(other)
    )
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
    assert run(place, source="changing", workdir="of_one") == 1
    assert message in capsys.readouterr().err
    arguments.unlink()
    (place / "of_one" / "start").mkdir()
    assert run(place, source="changing", workdir="of_one") == 1
    assert "of_one has stages, but no arguments.json with what they were computed from" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["parameters.safetensors", "model.json"])
def test_a_damaged_model_of_a_stage_is_named_and_made_again(tmp_path, damaged):
    made = []

    def make():
        made.append(model())
        return made[-1]

    beside = tmp_path / "fits.json"
    beside.write_text("{}")
    staged.saved_model(tmp_path / "fitted", make, beside=beside)
    file = tmp_path / "fitted" / damaged
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"damaged.*; remove {tmp_path}/fitted to create it again\.$"):
        staged.saved_model(tmp_path / "fitted", make, beside=beside)
    shutil.rmtree(tmp_path / "fitted")
    staged.saved_model(tmp_path / "fitted", make, beside=beside)
    staged.saved_model(tmp_path / "fitted", make, beside=beside)
    assert len(made) == 2
    beside.unlink()
    staged.saved_model(tmp_path / "fitted", make, beside=beside)
    assert len(made) == 3


def test_as_many_images_are_told_as_there_are(place, monkeypatch, capsys):
    """A training set of 16, though 1000 are asked for."""
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), tuple(SIZE), 1, place / "told")

    def stopped(*_, **__):
        raise InterruptedError("before anything is computed")

    monkeypatch.setattr(stages.selection, "moments", stopped)
    monkeypatch.setattr(stages.fit, "fit", stopped)
    config = made.config("stage1")
    for stage, more in ((stages._sigma, ()), (stages._fitted, ({1: None},))):
        with pytest.raises(InterruptedError):
            stage(made, config, made.model, *more)
        assert capsys.readouterr().out.endswith(", on 16 training images.\n")


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
    before = testing.randomise(jax.eval_shape(lambda: config.build(nnx.Rngs(0))), jax.random.key(0))
    after = replacement.with_backbone(before, replacement.replace(vit, {1: None}))
    assert [one.block for one in after.config.backbone.replaced] == [1]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(before.decoder), nnx.state(after.decoder))
    assert all(jax.tree.leaves(same))


def test_every_order_of_sigma_and_start_is_passed_on(place, monkeypatch):
    made = plan.Plan(
        plan.patches(model()), *CONFIG.split(":"), ("seed=3", *SIZE), None, place, heads=2, order="highest", kind="conv"
    )
    sigma = plan.selection.Sigma(np.array([[1.0, 6.0], [2.0, 5.0], [4.0, 3.0]]), np.array([3.5, 3.5, 3.5]))
    assert made.chosen(sigma, 0) == {0: (1,), 1: (1,)}
    assert stages.shown(made.chosen(sigma, 0)) == "heads in blocks 0 (1), 1 (1)"
    assert dataclasses.replace(made, order="lowest").chosen(sigma, 0) == {0: (0,), 1: (0,)}
    seeds = [dataclasses.replace(made, order="random").chosen(sigma, seed) for seed in range(9)]
    assert len(set(map(str, seeds))) > 1 and all(sum(map(len, places.values())) == 2 for places in seeds)
    asked = {}
    monkeypatch.setattr(stages.fit, "fit", lambda vit, places, images, **options: (vit, asked.update(options) or {}))
    places = {0: (1,)}
    for start in ("blur", None):
        stages._fitted(dataclasses.replace(made, start=start, workdir=place), made.config("stage1"), made.model, places)
        assert {key: asked[key] for key in ("kind", "form", "start")} == dict(kind="conv", form="released", start=start)
    assert [tuple(one) for one in made.replaced(places)] == [(0, "conv", 3, (1,), "released")]


def test_other_files_or_another_priority_are_timed_again(place, monkeypatch):
    """And only then: neither changes the models, so both may be asked for later."""
    timed, written = [], []

    def profile(paths, *, runs, realtime, say):
        timed.append(([path.name for path in paths], realtime))
        rows = [dict(file=str(path), milliseconds=1.0 + i) | {"bytes": 10} for i, path in enumerate(paths)]
        return dict(files=rows, conditions="c", realtime=realtime, machine="m", runtime="r")

    def write(path, model, size, classes, half):
        written.append((path.name, half, classes))
        path.touch()

    monkeypatch.setattr(stages.profile, "profile", profile)
    monkeypatch.setattr(stages.export, "write", write)
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), (), 1, place / "timed")
    made.workdir.mkdir()
    for options in ({}, {}, dict(half=True), dict(half=True), dict(half=True, realtime=True)):
        found, _ = stages._timed(dataclasses.replace(made, **options), (16, 32), DATA.classes, made.model, made.model)
    four = ["before.onnx", "after.onnx", "before_half.onnx", "after_half.onnx"]
    assert timed == [(four[:2], False), (four, False), (four, True)]
    assert written == list(zip(four, (False, False, True, True), [DATA.classes] * 4, strict=True))
    assert found["float32"] == ((1.0, 2.0), (10, 10)) and found["float16"].milliseconds == (3.0, 4.0)


def test_nearness_of_features_is_their_cosine_and_relative_error():
    """Over batches of which the last is smaller; a wrong mean over batches would weigh its images more."""
    before = random_model()
    after = replacement.replace(before, {1: None})
    images = np.random.default_rng(0).normal(size=(5, 16, 32, 3)).astype(np.float32)
    found = nearness.measure(before, after, [images[:3], images[3:]])
    x, y = (np.asarray(nearness._tokens(each, images), np.float64) for each in (before, after))
    cosine = (x * y).sum(-1) / np.sqrt(np.square(x).sum(-1) * np.square(y).sum(-1))
    np.testing.assert_allclose(found.cosine, cosine.mean((1, 2, 3)), rtol=1e-6)
    error = np.square(x - y).sum((1, 2, 3, 4)) / np.square(x).sum((1, 2, 3, 4))
    np.testing.assert_allclose(found.error, error, rtol=1e-5, atol=1e-12)
    assert found.error[0] == 0 < 1e-3 < found.error[1]  # the first replaced block is the second
    np.testing.assert_allclose(x[-1], before.features(images).patches.values, atol=1e-6)


def test_without_a_head_the_report_has_the_nearness_of_features(place, monkeypatch):
    vit = random_model()
    made = plan.Plan(vit, *CONFIG.split(":"), tuple(SIZE), 1, place / "features", images=8, kind="identity", start=None)
    made.workdir.mkdir()
    after = replacement.replace(vit, {2: None}, kind="identity")
    config = made.config("stage1")
    found = stages._features(made, config, vit, after)
    monkeypatch.setattr(stages.nearness, "measure", lambda *_: pytest.fail("done already"))
    again = stages._features(made, config, vit, after)
    np.testing.assert_array_equal(found.cosine, again.cosine)
    times = {name: stages.Times((2.0, 1.0), (20, 10)) for name in ("float32", "float16")}
    result = stages.Result(None, found, times, made.replaced({2: None}), [1.0, 2.0, 0.5], {2: 0.5}, "a clock")
    written = report._report(made, result)
    assert written["metric"] is None and written["half"]["milliseconds"] == dict(before=2.0, after=1.0)
    assert written["features"]["cosine"] == found.cosine[-1] == written["features"]["blocks"][2]["cosine"] < 1
    assert written["features"]["blocks"][1] == dict(cosine=pytest.approx(1), error=0)
    page = report._page(made, result)
    assert "| relative squared error of the features | 0 |" in page and "| megabytes, float16 |" in page
    assert "# Attention replaced by identity (released): 1 of 3 blocks" in page


def test_hints_belong_to_what_a_directory_was_begun_with(tmp_path):
    """Also sizes, which are tuples here and lists in the file."""
    given = dict(weights="clip:a.pt", input=None, config=CONFIG, blocks=None, images=8, fit_only=False)
    given |= dict(workdir=tmp_path, heads=2, kind="dw", form="released", order="lowest", start=None)
    hints = dict(num_heads=3, image_size=(16, 32), mlp="gelu", checkpoint_key="model")
    for _ in range(2):
        staged.claim(types.SimpleNamespace(**given, **hints), plan.DECISIONS, (), "a digest")
    others = dict(num_heads=6, image_size=(16, 16), mlp="quick_gelu", checkpoint_key="ema")
    others |= dict(heads=3, kind="conv", form="printed", order="random", start="blur")
    for name, other in others.items():
        with pytest.raises(ValueError, match=f"was begun with {name}=.*; give that value, or another --workdir"):
            staged.claim(types.SimpleNamespace(**(given | hints | {name: other})), plan.DECISIONS, (), "a digest")


def test_a_config_for_other_pixels_than_those_of_the_weights_is_refused(place):
    made = plan.Plan(plan.patches(model()), *CONFIG.split(":"), (), 1, place)
    plan._check_pixels(made, "dinov2:weights.pth")
    clip = plan.patches(model(pre_norm=True))  # as of hf:openai/clip-vit-base-patch16
    for other, weights in ((made, "clip:weights.pt"), (dataclasses.replace(made, model=clip), "hf_clip.pt")):
        with pytest.raises(
            ValueError, match=r"images of \S+ are normalised by mean=\(0.48.*; give --config.data.mean=0"
        ):
            plan._check_pixels(other, weights)
    plan._check_pixels(dataclasses.replace(made, model=clip, mode="in1k,clip_b16"), "hf_clip.pt")
    plan._check_pixels(dataclasses.replace(made, mode="in1k,clip_b16"), "clip:weights.pt")
    plan._check_pixels(dataclasses.replace(made, changes=("data.mean=(0.5,)",)), "clip:weights.pt")
    with pytest.raises(ValueError, match="names a CLIP backbone; leave it out"):
        plan._check_pixels(dataclasses.replace(made, mode="in1k,clip_b16"), "mae:weights.pth")
    saved.save(place / "halves", model(class_token=False, pool="mean"), DATA)
    with pytest.raises(
        ValueError, match=r"halves are normalised by mean=\(0.5, 0.5, 0.5\); give --config.data.mean=0.5"
    ):
        plan._check_pixels(made, str(place / "halves"))
