"""`equivit.octify`: the starts, the targets, every stage in order, and what is refused before the first."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import octify, staged, testing
from equivit.models import saved, zoo
from equivit.objectives import feature_matching
from equivit.octification import layers, measures, plan, stages, starts
from equivit.symmetry import fields
from equivit.trained_on import TrainedOn
from equivit.training import build, checkpoints, sharding
from equivit.training import config as configs
from tests.training.state_test import mesh_of

TINY = dict(width=32, depth=2, num_heads=2, patch_size=8, image_size=(32, 32), in_channels=3)
H8 = dict(family="H8", equivariant_blocks=1, transition_map=True)
IMAGES = np.asarray(jax.random.normal(jax.random.key(2), (2, 16, 24, 3)))  # a grid of 2 x 3
CONFIG = f"{pathlib.Path(__file__).parents[1]}/configs/octify.py"
DATA = ["data.source=synthetic", "data.split=train", "data.image_size=(32,32)", "data.train_examples=32"]
DATA += ["data.eval_examples=8", "batch_size=8", "epochs=None", "steps=4", "schedule.warmup_epochs=None"]
DATA += ["evaluation.knn.ks=(5,)", "evaluation.linear_probe.steps=2", "evaluation.linear_probe.batch_size=8"]


def dense(**options):
    return testing.randomise(zoo.abstract("vit_ti16", **{**TINY, "num_classes": None, **options}), jax.random.key(0))


def test_what_is_symmetric_in_some_basis_is_kept():
    """Patch kernels and positions of an octic model, read in a basis that does not know the group."""
    model = testing.randomise(zoo.abstract("octic_vit_ti16", **TINY, **H8, num_classes=None), jax.random.key(1))
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))
    embed = jax.jit(lambda model: (model.patch_embed.affine()[0], fields.to_dense(model.position((4, 4)))))
    kernel, position = (np.asarray(a) for a in embed(model))
    symmetric = {"patch_embed.kernel": kernel @ basis, "position.table": (position @ basis).reshape(4, 4, -1)}
    teacher = starts.put(dense(), symmetric)
    student = starts.octic(teacher, H8, "projected", nnx.Rngs(0))
    found_kernel, found_position = (np.asarray(a, np.float64) for a in embed(student))
    back = np.linalg.lstsq(found_kernel.reshape(-1, 32), (kernel @ basis).reshape(-1, 32), rcond=1e-6)[0]
    for found, wanted in ((found_kernel, kernel), (found_position, position)):
        np.testing.assert_allclose(found @ back, wanted @ basis, rtol=0, atol=1e-4 * np.abs(wanted).max())
    drawn = np.asarray(embed(starts.octic(teacher, H8, "drawn", nnx.Rngs(0)))[1], np.float64)
    assert np.abs(drawn @ back - position @ basis).max() > 1e-2 * np.abs(position).max()


def test_averaged_targets_are_equivariant_and_upright_ones_are_not():
    teacher = dense()

    @jax.jit
    def both(images):
        return [feature_matching.targets(teacher, images, "last", 1, averaged) for averaged in (True, False)]

    upright, turned = both(IMAGES), both(fields.act_on_image("mr", IMAGES))
    averaged, single = (
        np.abs(fields.act_on_tokens("mr", np.asarray(a), (2, 3), 1) - b).max() / np.abs(a).max()
        for a, b in zip(upright, turned, strict=True)
    )
    assert averaged < 1e-5 and single > 1e-2


def test_least_squares_leave_the_error_that_they_report_and_the_stages_train_their_part():
    teacher = dense()
    student = starts.octic(teacher, H8, "drawn", nnx.Rngs(0))
    student, error = starts.fitted(teacher, student, [IMAGES, IMAGES[:1]], orientations=False)

    @jax.jit
    def at_transition(student):
        wanted = feature_matching.targets(teacher, IMAGES, "transition", 1, False)
        return wanted, feature_matching.tokens(student, IMAGES, "transition", 1)

    wanted, found = (np.asarray(a)[[0, 1, 0]] for a in at_transition(student))  # the first image counts twice
    left, varying = (np.square(a).sum((0, 2)) for a in (found - wanted, wanted - wanted.mean(0)))
    ratios = [left[part].sum() / varying[part].sum() for part in feature_matching.parts(1)]
    assert error == pytest.approx(np.mean(ratios), rel=1e-2)  # of two large numbers in float32
    frozen = {}
    for place in feature_matching.PLACES:
        objective = build.make_objective(config_of(place, student))
        tables = build.logical.tensors(student).values()
        frozen[place] = {t.name for table in tables for t in table.flat if objective.rule(t).frozen}
    assert frozen["last"] == set()
    assert {name.split(".")[0] for name in frozen["transition"]} == {"blocks", "readout"}
    assert {name.split(".")[1] for name in frozen["transition"] if name.startswith("blocks")} == {"1"}


def test_lifted_tokens_are_fields_and_a_fitted_embedding_is_the_teachers_in_their_basis():
    """The teacher's tokens of a turned image are its tokens of the image, turned as a field, and its channels mixed."""
    teacher, images = dense(), IMAGES[:, :16, :16]
    student = starts.octic(teacher, H8, "layers", nnx.Rngs(0))
    generator = np.random.default_rng(0)
    basis = layers.Basis(generator.normal(size=(4, 32, 4)), generator.normal(size=(64, 8)))

    @jax.jit
    def both(images):
        return layers.lifted(layers.turned_tokens(teacher, images)[0]), student.embed(images)[0]

    student = starts.put(student, layers.embedding(teacher, student, basis))
    lifted, embedded = both(images)
    turned, _ = both(fields.act_on_image("mr", images))
    for found, wanted in (
        (turned, fields.act("mr", lifted, (2, 2), 1)),
        (embedded, basis(lifted)),
    ):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


def config_of(place, student, *changes):
    c = configs.load(f"{CONFIG}:small", [*DATA, f"objective.place={place}", "objective.teacher=t", *changes]).unlock()
    c.model = zoo.options(student.config)
    configs.validate(c)
    return c.lock()


def test_the_head_of_the_loaded_model_is_kept_classifier_or_projection():
    bare = dense()
    for head in (dict(num_classes=5), dict(projection=6)):
        whole = stages.with_head(bare, loaded := dense(**head))
        np.testing.assert_array_equal(whole.head.weight, loaded.head.weight)
        assert whole.config == loaded.config
    assert stages.with_head(bare, bare) is bare


def test_an_octic_model_agrees_with_itself_and_deviates_as_its_family_does():
    models = {
        family: testing.randomise(zoo.abstract("octic_vit_ti16", **TINY, **f), jax.random.key(3))
        for family, f in dict(I8=dict(family="I8"), H8=H8).items()
    }
    assert measures.deviation(models["I8"], IMAGES) < 1e-5 < 1e-2 < measures.deviation(models["H8"], IMAGES)
    found = measures.agreement(models["H8"], models["H8"], [IMAGES], orientations=False)
    np.testing.assert_allclose(found, (1, 1, 0, 0), atol=1e-5)


@pytest.mark.slow
def test_stopped_and_resumed_equals_uninterrupted(tmp_path):
    teacher = dense()
    student = starts.octic(teacher, H8, "projected", nnx.Rngs(0))
    c, mesh = config_of("last", student, "objective.orientations=True"), mesh_of(1, 1)
    with jax.set_mesh(mesh), checkpoints.Checkpoints(tmp_path, c.checkpoint) as manager:
        run = build.make_program(c, mesh, total=4, per_epoch=4, teachers={"teacher": teacher})

        def steps(state, stop):
            for t in range(int(state.step), stop):
                image = np.random.default_rng(t).integers(0, 256, (8, 32, 32, 3)).astype(np.uint8)
                state, _ = run.step(state, sharding.to_global(mesh, {"image": image}))
            return state

        state = steps(run.init({}), 2)
        manager.save(state)
        whole = steps(state, 4)
        resumed = steps(manager.restore(run.abstract), 4)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(whole))


# ---- The command

CLASSES = tuple("abcdefghij")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("octify")
    images = dict(mean=configs.get_base().data.mean, std=(0.25, 0.25, 0.25))
    data = TrainedOn(CLASSES, 7, images)
    saved.save(found / "teacher", dense(num_classes=10, registers=2, layer_scale=0.1), data)
    return found


def run(place, *more, family="H8", workdir="octic"):
    arguments = [f"--input={place / 'teacher'}", f"--family={family}", f"--config={CONFIG}:small", "--images=8"]
    arguments += [f"--workdir={place / workdir}", *(f"--config.{key}" for key in [*DATA, "data.std=(0.25,0.25,0.25)"])]
    return octify.main([*arguments, *more])


@pytest.mark.slow
def test_every_stage_is_done_once_in_order(place, monkeypatch):
    """Training itself is tested above and elsewhere; here it gives back what it begins with."""
    begun = []

    def trained(config, stage, init):
        begun.append((stage.name, init.name, config.objective.place, config.objective.orientations))
        saved.save(stage, saved.load(init))
        return saved.load(stage)

    monkeypatch.setattr(staged, "trained", trained)
    assert run(place, "--debug") == 0
    assert begun == [("stage1", "start", "transition", False), ("stage2", "stage1", "last", False)]
    report = json.loads((place / "octic" / "report.json").read_text())
    assert report["figures"].keys() == {"teacher", "start", "stage1", "stage2"}
    assert report["figures"]["teacher"]["agreement"]["patches"] == pytest.approx(1, abs=1e-5)
    assert report["figures"]["start"] == report["figures"]["stage2"]
    errors = report["starts"]
    assert errors.keys() == set(starts.STARTS) and errors["layers"] < 0.5 * min(errors["projected"], errors["drawn"])
    page = (place / "octic" / "report.md").read_text()
    for words in ("| knn/top1, % |", "| linear_probe/top1, % |", "| milliseconds per image |"):
        assert words in page
    assert all((place / "octic" / name).is_file() for name in re.findall(r"!\[.*\]\((features_.*)\)", page))
    assert {"teacher", "stage2", "machine"} <= report["milliseconds"].keys()
    model, teacher = saved.load(place / "octic" / "model"), saved.load(place / "teacher")
    assert (model.config.family, model.config.num_classes) == ("H8", 10)
    np.testing.assert_array_equal(model.head.weight, teacher.head.weight)
    for name, classes in dict(teacher=(), start=(), model=CLASSES).items():
        data = saved.trained_on(place / "octic" / name)
        assert data.classes == classes and data.images["image_size"] == (32, 32) and data.images["std"] == (0.25,) * 3

    def never(*_, **__):
        raise AssertionError("done already")

    monkeypatch.setattr(stages.measures, "agreement", never)
    monkeypatch.setattr(stages.starts, "fitted", never)
    assert run(place) == 0
    assert json.loads((place / "octic" / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family=H7"], "--family='H7' is not one of H8, I8, D8"),
        (["--blocks=2"], "--blocks=2 must lie between 1 and 1, for H8"),
        (["--family=D8", "--blocks=1"], "--blocks=1: all 2 blocks of D8 are octic; leave it out"),
        (["--config.model.width=64"], "--config.model.width: the weights and --family determine this"),
        (["--config=configs/mae.py"], "configs/mae.py: its objective is not 'feature_matching'; use configs/octify.py"),
        (["--num_heads=2"], "--num_heads is only for --weights; saved models already contain it"),
        (["--config.data.image_size=(36,36)"], "36x36"),
        (
            ["--config.data.std=(0.5,0.5,0.5)"],
            "teacher are normalised by std=(0.25, 0.25, 0.25); give --config.data.std=0.25,0.25,0.25",
        ),
        (["--config.evaluation.knn.ks=(50,)"], "50"),
        (["--config.data.eval_examples=1"], "the number of images of the split 'test', 1, must be at least 2"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refused_before_anything_is_written(arguments, message, place, capsys):
    assert run(place, *arguments, workdir="refused") == 1
    assert message in capsys.readouterr().err
    assert not (place / "refused").exists()


def test_one_image_has_no_differences_to_fit(capsys):
    with pytest.raises(SystemExit):
        octify.main(["--images=1"])
    assert "--images: '1' must be a whole number from 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mlp="quick_gelu"), "octic layers cannot follow this model: ViT: mlp='quick_gelu' is for plain models"),
        (dict(width=40, num_heads=2), "must be divisible by num_heads=2 times 8"),
        (dict(position="rotary"), "this model has rotary positions, which octic blocks lack"),
        (dict(adaptive=True), "this model has adaptive patches; begin with the original model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_models_that_cannot_be_octic_are_refused(fields, message, monkeypatch, tmp_path):
    monkeypatch.setattr(plan.loading, "load_model", lambda *_, **__: dense(**fields))
    with pytest.raises(ValueError, match=message):
        run(tmp_path, "--debug")


def test_images_without_labels_are_compared_by_features_alone(capsys):
    config = configs.load(f"{CONFIG}:small", [*DATA, "objective.teacher=t"])
    assert plan._suite(config, dense(), labelled=True) == ("knn", "linear_probe")
    assert plan._suite(config, dense(), labelled=False) is None
    assert "these images have no labels; knn and linear_probe are left out" in capsys.readouterr().out


def test_a_map_at_the_transition_is_for_dropped_symmetries():
    with pytest.raises(ValueError, match="transition_map=True is for families H8 and H2, .* not for I8"):
        zoo.configuration("octic_vit_ti16", family="I8", transition_map=True)
