"""Mistyped values: one line names the mistake, before anything is compiled."""

import types

import jax
import pytest
from flax import nnx

from equivit import summarize, train
from equivit.models import zoo
from equivit.objectives import masking
from equivit.objectives.masking import Tokens
from equivit.objectives.registry import OBJECTIVES
from equivit.training import config as configs
from equivit.training import loop

CONFIG = "configs/quickstart.py:quicktest,plain"


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """A function that runs the command up to the training loop, where values must have been refused."""
    monkeypatch.setattr(loop, "train", lambda *args, **kwargs: pytest.fail("training began"))

    def run(*arguments):
        assert train.main([f"--config={CONFIG}", f"--workdir={tmp_path}", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 700
        return err

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # What the data say.
        ("data.eval_split=tset", "digits: there is no split 'tset'; splits: train, test"),
        ("data.eval_examples=9999", "config.data.eval_examples=9999 must be in 1..360"),
        ("model.num_classes=3", "config.model.num_classes=3: the data (digits) have 10 classes; set it to 10"),
        ("model.num_classes=None", "has no head, which objective.name='supervised' trains"),
        ("model.in_channels=3", "config.model.in_channels=3: the data (digits) have 1 channels; set it to 1"),
        ("data.image_size=(32,30)", "training images 32x30: the width 30 is not divisible by the patch width 4"),
        ("epochs=1e30", "set exactly one"),
        # Values of the model.
        ("model.num_heads=-2", "ViT: num_heads=-2 must be a positive whole number; the nearest is 1"),
        ("model.num_heads=0", "num_heads=0 must be a positive whole number"),
        ("model.equivariant_blocks=1.5", "equivariant_blocks=1.5 must be a whole number, zero or more, or None"),
        ("model.registers=four", "registers='four' must be a whole number, zero or more"),
        ("model.init=xavier", "ViT: init='xavier' is not one of normal, truncated_normal, xavier_uniform; the nearest"),
        ("model.head_std=-1", "ViT: head_std=-1 must be zero or more"),
        ("model.head_bias=priors", "ViT: head_bias='priors' is not one of zero, prior; the nearest is 'prior'"),
        ("model.fc_norm=1", "ViT: fc_norm=1 must be True or False"),
        ("model.registers=-1", "registers=-1 must be"),
        ("model.depth=0", "depth=0 must be a whole number in [1, 4096]; the nearest is 1"),
        ("model.drop_path=2", "drop_path=2 must be in [0, 1), or two numbers in [0, 1)"),
        ("model.dropout=1.0", "dropout=1.0 must be in [0, 1)"),
        ("model.norm_eps=-1", "norm_eps=-1 must be positive"),
        ("model.mlp_dim=-3", "mlp_dim=-3 must be a positive whole number, or None"),
        ("model.token_std=abc", "token_std='abc' must be a number, zero or more"),
        ("model.patch_size=0", "patch_size=(0, 0) must be (height, width) in pixels, such as (1, 1)"),
        ("model.image_size=29", "image_size=29 must be (height, width) in pixels, such as (29, 29)"),
        ("model.family=H9", "family='H9' is not one of plain, H8, I8, D8, H2, I2, D2; the nearest is 'H8'"),
        ("model.family=[1]", "is not one of plain"),
        ("model.dtype=float8x", "'dtype' is not one of its options"),
        ("model.rngs=5", "'rngs' is not one of its options"),
        ("model.keys=5", "'keys' is not one of its options"),
        ("model.width={[]:1}", "width='{[]:1}' must be a positive whole number"),
        ("model.name=patchtst", "config.model.name='patchtst' is for time series"),
    ],
)
def test_what_is_known_at_the_start_is_checked_there(change, message, refused):
    assert message in refused(f"--config.{change}")


@pytest.mark.parametrize("option", ["model.name", "model.family", "data.source", "precision", "evaluation.suite"])
def test_a_long_value_is_cut(option, refused):
    refused(f"--config.{option}={'x' * 5000}")


@pytest.mark.parametrize("seeds", ["0,4294967296", "1,1", "-1", "1.5"])
def test_seeds_that_are_one_are_refused(seeds, refused):
    assert "--seeds=" in refused(f"--seeds={seeds}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.void=11", "config.data.void=11 must be one or more finite whole numbers, such as (11,)"),
        ("evaluation.shift.ranges=8", "or two whole numbers, zero or more, such as (8,)"),
        ("data.image_size=29", "config.data.image_size=29 must be (height, width) in pixels, such as (29, 29)"),
        ("data.mean=0.5", "config.data.mean=0.5 must be one or more numbers in [0, 1], such as (0.5,)"),
        ("data.mean=('a',)", "config.data.mean='a' must be a number in [0, 1]"),
        ("data.source=none", "config.data.source='none' is not one of digits"),
        ("data.augment.scale=none", "config.data.augment.scale=None must be two numbers in (0, 1]"),
        ("data.augment.rand_augment=5", "rand_augment=5 must be a string, or None"),
        ("data.augment.rand_augment=rand-n9999-inc1", "n a whole number in 1..100"),
        ("data.augment.three_augment=none", "three_augment=None must be True or False"),
        ("data.crop_ratio=1e-9", "resizes images to more than 32768 pixels a side"),
        ("data.channels=2", "config.data.channels=2 must be 1 (grey) or 3 (RGB), or None"),
        ("data.workers=1000000", "workers=1000000 must be a whole number in [0, 1024]; the nearest is 1024"),
        ("data.max_pixels=1e9", "the most that Pillow opens; the nearest is 178956970"),
        (
            "data.max_pixels=178956971",
            "max_pixels=178956971 must be a whole number, positive and at most 178956970, the most that Pillow opens; "
            "the nearest is 178956970",
        ),
        ("data.interpolation=bicbic", "interpolation='bicbic' is not one of bicubic, bilinear; the nearest is"),
        ("data.augment.crop=random_resized_cliped", "the nearest is 'random_resized_clipped'"),
        ("evaluation.corruption_crop_ratio=0", "config.evaluation.corruption_crop_ratio=0.0 must be in (0, 1]"),
        ("objective.mix_groups=0", "mix_groups=0 must be a positive whole number; the nearest is 1"),
        ("optimizer.name=lars_optx", "the nearest is 'lars_optax'"),
        ("objective.name=none", "config.objective.name=None is not one of"),
        ("objective.ema=0.99999999999", "must be a decay in (0, 1), or None; in float32 it is 1"),
        ("optimizer.betas=none", "config.optimizer.betas=None must be two numbers in [0, 1)"),
        ("optimizer.no_decay=none", "config.optimizer.no_decay=None must be one or more strings, or ()"),
        ("optimizer.accumulation=64", "must be divisible by optimizer.accumulation=64; the nearest is 64"),
        ("optimizer.weight_decay=1e999", "config.optimizer.weight_decay=inf must be zero or more and finite"),
        ("schedule.lr=1e999", "config.schedule.lr=inf must be positive and finite"),
        ("schedule.lr=True", "config.schedule.lr=True must be a positive number; True is not a number"),
        ("seed=4294967296", "seed=4294967296 must be a whole number in [0, 4294967295]"),
        ("seed=1e22", "config.seed=1e+22 must be a whole number in [0, 4294967295]; the nearest is 4294967295"),
        ("steps=True", "config.steps=True must be a positive whole number, or None; True is not a number"),
        ("epochs=many", "config.epochs='many' must be a positive number, or None"),
        ("checkpoint.every_steps=0.5", "every_steps=0.5"),
        ("evaluation.sar.batch_size=0", "config.evaluation.sar.batch_size=0 must be a positive whole number"),
        ("evaluation.sar.lr=none", "config.evaluation.sar.lr=None must be a number, zero or more"),
        ("evaluation.suite=5", "config.evaluation.suite=5 must be a string, or one or more strings"),
        ("log.every_steps=none", "config.log.every_steps=None must be a positive whole number"),
        (
            "mesh.data=True",
            "mesh.data=True must be positive, or -1 for the remaining devices; True is not a number",
        ),
        ("init=5", "config.init=5 must be a string, or None"),
        ("batch_size=" + "9" * 5000, "999... (5002 characters)"),
        ("batch_size=0x" + "f" * 5000, "config.batch_size=<an integer of 20000 bits> must be a positive whole number"),
        ("init=(((", None),
    ],
    ids=lambda text: str(text)[:40],
)
def test_overrides(override, message):
    if message is None:
        assert configs.load(CONFIG, [override]).init == "((("
        return
    with pytest.raises(ValueError) as error:
        configs.load(CONFIG, [override])
    assert message in str(error.value) and len(str(error.value)) < 300


def test_a_patch_of_the_model_may_be_a_pair():
    assert configs.load(CONFIG, ["model.patch_size=(4,8)"]).model.patch_size == (4, 8)


def test_a_run_has_no_more_steps_than_are_counted():
    config = configs.load(CONFIG, ["steps=None", "epochs=1e30"])
    with pytest.raises(ValueError, match="epochs=1e.30: steps are counted in int32; at most 536870911 epochs fit"):
        loop.total_steps(config, 4)


def test_summarize_says_it_too(capsys):
    for change in ("width=wide", "rngs=5", "num_heads=0", "width={[]:1}"):
        assert summarize.main(["--model=vit_l16", f"--model.{change}"]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def made(goal, name="vit_ti16", **sections):
    """An objective by its name, and the configuration of a model for images of 16x16."""
    config = configs.get_base(goal)
    config.model = dict(name=name, image_size=(16, 16), patch_size=4, num_classes=10, in_channels=3)
    for section, values in sections.items():
        config[section].update(values)
    fields = {key: value for key, value in config.model.items() if key != "name"}
    return OBJECTIVES[goal](config), zoo.configuration(name, **fields)


def test_token_dropping_needs_tokens():
    """BiXT and Swin have some, and take all of them."""
    goal, _ = made("supervised", objective=dict(token_drop=(0.5, 0.0)))
    series = zoo.configuration("patchtst", length=8, channels=3, num_classes=10)
    for config in (series, *map(zoo.configuration, ("bixt_ti_p16", "swin_t", "shvit_s1"))):
        with pytest.raises(ValueError, match="Config has no patch tokens to drop; set it to None"):
            goal.static(types.SimpleNamespace(config=config), 0.0)


@pytest.mark.parametrize("goal", ["mae", "dinov2"])
@pytest.mark.parametrize("name", ["efficientvit_b0", "bixt_ti_p16", "swin_t"])
def test_what_masks_patches_needs_a_vit(goal, name):
    """Refused with the config: what comes next asks the model for its patches."""
    config = configs.get_base(goal)
    config.update(epochs=1, model=dict(name=name, num_classes=None))
    match = f"config.model.name='{name}': objective.name='{goal}' drops or masks patches.*; use one"
    with pytest.raises(ValueError, match=match):
        configs.validate(config)


@pytest.mark.parametrize("goal", ["mae", "dinov2"])
def test_what_compares_patches_needs_a_fixed_grid(goal):
    """An adaptive model lets each image's patches begin elsewhere, a teacher elsewhere than its student."""

    def validate(adaptive):
        config = configs.get_base(goal)
        config.update(epochs=1, model=dict(name="vit_s16", num_classes=None, adaptive=adaptive))
        configs.validate(config)

    match = rf"config.model.adaptive=.*: .* objective.name='{goal}' compares patches .*; set it to False\.$"
    for adaptive in (True, ("token",)):
        with pytest.raises(ValueError, match=match):
            validate(adaptive)
    for adaptive in (False, ("position",)):  # distances around the torus move no patch
        validate(adaptive)


def test_distillation_drops_tokens_of_the_students_images():
    """The teacher's are larger: more tokens than the student has."""
    sizes = dict(image_size=(16, 16), train_image_size=(32, 32))
    goal, config = made("distillation", data=sizes, objective=dict(token_drop=(0.5, 0.0)))
    assert goal.static(types.SimpleNamespace(config=config), 0.0) == Tokens(8, 16)


def test_a_teacher_of_other_classes_or_images_is_refused():
    goal, config = made("distillation", data=dict(image_size=(16, 16)), objective=dict(teacher="zoo:vit_ti16"))

    def check(**fields):
        goal.check_model(config, {"teacher": types.SimpleNamespace(config=zoo.configuration("vit_ti16", **fields))})

    check(num_classes=10)
    with pytest.raises(ValueError, match="the teacher has 7 classes, the model 10"):
        check(num_classes=7)
    with pytest.raises(ValueError, match="objective.teacher=zoo:vit_ti16 16x16: the height 16 .* the nearest is 32"):
        check(num_classes=10, patch_size=32, image_size=(32, 32))
    with pytest.raises(ValueError, match="they have 3 channels and the model takes 1"):
        check(num_classes=10, in_channels=1)


def test_an_adaptive_model_needs_whole_grids():
    """Grids of patches, of merged patches and of windows; the ordinary model pads them."""
    fields = dict(depths=(1, 1), num_heads=(1, 2), window_size=2)
    goal, ordinary = made("supervised", "swin_t", model=fields, data=dict(image_size=(16, 24)))
    _, adaptive = made("supervised", "swin_t", model=fields | dict(adaptive=True))
    goal.check_model(ordinary, {})
    with pytest.raises(
        ValueError, match="the width 24 of the images is not a multiple of 16, .*; the nearest are 16 and"
    ):
        goal.check_model(adaptive, {})


def test_groups_of_batch_statistics_divide_a_micro_batch():
    fields = dict(name="efficientvit_b0", image_size=(32, 32), num_classes=10, in_channels=3, statistics_groups=3)
    config = configs.get_base("supervised")
    config.update(batch_size=8, optimizer=dict(accumulation=2), data=dict(image_size=(32, 32)), model=fields)
    match = "config.model.statistics_groups=3 must divide the 4 images of a micro-batch; the nearest that does is 2"
    with pytest.raises(ValueError, match=match):
        OBJECTIVES["supervised"](config).check_model(zoo.configuration(**config.model), {})


def test_a_masked_autoencoder_must_remove_and_keep_patches():
    goal, config = made("mae", data=dict(image_size=(8, 8)), objective=dict(ratio=0.9))
    with pytest.raises(ValueError, match="ratio=0.9 of 4 patches keeps 0"):
        goal.check_model(config, {})
    assert masking.number_kept(4, 0.5) == 2


def test_a_plain_model_has_no_block_with_a_field():
    model = jax.eval_shape(lambda: zoo.create("vit_pico16", depth=1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"blocks \[0\] carry no field; no block of this model does"):
        model.fields(None, (0,))
