"""Recipes beside the official codes, number by number, where a difference would change what is trained."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.configs import adaptive_cifar, adaptive_imagenet, recipes
from equivit.layers import dense
from equivit.models import zoo
from equivit.models.decoders import MaskedAutoencoderConfig
from equivit.models.vit import parts as vit_parts
from equivit.training import config as configs
from equivit.training import schedules

ROOT = pathlib.Path(__file__).parents[2] / "configs"
IMAGES = 1_281_167  # of ImageNet-1k


def load(name):
    return configs.load(str(ROOT / name))


def model(name):
    return zoo.configuration(**load(name).model)


@pytest.mark.parametrize("name", ["L,plain", "L,H8,384", "H,H8", "H,D8,384"])
def test_fine_tuning_of_deit3(name):
    """Every image once an epoch; timm's scheduler, stepped after each epoch, whose cosine ends where it begins."""
    config = load(f"octic_finetune.py:{name}")
    assert config.data.repeats == 1
    per_epoch = IMAGES // config.batch_size
    assert per_epoch == 2502
    rate = schedules.create(config.schedule, total_steps=20 * per_epoch, steps_per_epoch=per_epoch)
    steps = np.arange(20)[:, None] * per_epoch + np.array([0, per_epoch - 1])
    official = np.array([1, 1, 2.8, 4.6, 6.4, 8.2] + [10] * 14) * 1e-6
    np.testing.assert_allclose(rate(jnp.asarray(steps)), np.stack([official] * 2, 1), rtol=1e-6)  # float32
    drop_path = {"L,plain": 0.45, "L,H8,384": 0.4, "H,H8": 0.55, "H,D8,384": 0.55}[name]
    built = model(f"octic_finetune.py:{name}")
    np.testing.assert_allclose(built.rates, [drop_path] * built.depth, rtol=1e-6)
    assert built.image_size == tuple(config.data.image_size)  # positions are trained at the new grid


def test_no_colour_jitter_beside_rand_augment():
    """As timm, which takes the one or the other."""
    for name in ("jumbo_in1k.py:224", "octic_finetune.py", "finetune.py", "cifar.py"):
        augment = load(name).data.augment
        assert augment.rand_augment and not augment.color_jitter
    assert load("jumbo_in1k.py:128").data.augment.color_jitter == 0.3


@pytest.mark.parametrize(("name", "largest"), [("B,plain", 0.1), ("L,plain", 0.2), ("B,jumbo", 0.1)])
def test_fine_tuning_of_mae(name, largest):
    """Drop path grows over the blocks; the head begins next to zero; a new norm after the mean of plain patches."""
    config = model(f"finetune.py:{name}")
    np.testing.assert_allclose(config.rates, np.linspace(0, largest, config.depth), rtol=1e-6)
    head = vit_parts.make_head(config, 64, False, nnx.Rngs(0))
    assert np.std(head.weight[...]) == pytest.approx(2e-5, rel=0.02)  # 64,000 entries: 0.3 %
    assert config.fc_norm == (name != "B,jumbo")


def test_fine_tuning_of_the_fork():
    """Jumbo's masked autoencoder, as in its scripts: the rate is not scaled by the batch of 1024."""
    config, built = load("finetune.py:B,jumbo,fork,lr=3e-3,wd=0.07"), model("finetune.py:B,jumbo,fork")
    rate = schedules.create(config.schedule, total_steps=110 * 1251, steps_per_epoch=1251)
    np.testing.assert_allclose(rate(np.array([0, 10 * 1251, 110 * 1251])), [1e-6, 3e-3, 1e-5], rtol=1e-5)
    assert (config.epochs, config.batch_size) == (110, 1024)
    assert (config.optimizer.weight_decay, config.optimizer.layer_decay) == (0.07, 0.65)
    assert (tuple(config.data.augment.scale), config.data.augment.erase) == ((0.2, 1.0), 0.0)
    np.testing.assert_allclose(built.rates, [0.1] * 12, rtol=1e-6)
    head = vit_parts.make_head(built, 64, False, nnx.Rngs(0))
    assert np.std(head.weight[...]) == pytest.approx(0.02, rel=0.02)
    plain = load("finetune.py:B,jumbo")
    assert (plain.epochs, plain.schedule.lr, plain.data.augment.erase) == (100, 2e-3, 0.25)


def test_linear_probes_crop_and_step_as_each_code():
    mae, fork = load("linear_probe.py:B,plain"), load("linear_probe.py:B,plain,fork")
    assert (mae.data.augment.crop, mae.optimizer.name) == ("random_resized_clipped", "lars")
    assert (fork.data.augment.crop, fork.optimizer.name) == ("random_resized", "lars_optax")
    assert fork.objective.affine and not mae.objective.affine


def drawn(name):
    """The logical tensors of a small masked autoencoder of a recipe."""
    small = dict(width=48, depth=1, num_heads=2, patch_size=4, image_size=(16, 16), in_channels=3)
    config = zoo.configuration(**{**load(name).model, **small})
    whole = MaskedAutoencoderConfig(config, decoder_width=32, decoder_depth=1, decoder_heads=2)
    built = jax.jit(lambda: whole.build(nnx.Rngs(params=0)))()
    table = {tensor.name: tensor for leaf in logical.tensors(built).values() for tensor in leaf.flat}
    return table, jax.device_get(logical.to_logical(built))


def matrix(tensor):
    """A kernel of patches is a matrix too."""
    return tensor.reshape(-1, tensor.shape[-1])


def test_initial_weights_of_mae():
    """Uniform within sqrt(6 / (inputs + outputs)): encoder, decoder, the Jumbo token's MLP and the patches."""
    table, tensors = drawn("mae.py:B,jumbo")
    found = {name for name in tensors if table[name].product}
    assert {"encoder.patch_embed.kernel", "encoder.jumbo_mlp.fc1.weight", "decoder.pixels.weight"} <= found
    for name in found:
        weight = matrix(tensors[name])
        bound = np.sqrt(6 / sum(weight.shape))
        assert 0.98 * bound < np.abs(weight).max() <= bound, name
        assert np.std(weight) == pytest.approx(bound / np.sqrt(3), rel=0.06), name  # 1,536 entries: 5 times 1.2 %
    assert np.std(tensors["encoder.prefix.jumbo_token"]) == pytest.approx(0.02, rel=0.3)  # 144 entries: 5 times 6 %


def test_initial_weights_of_the_jax_version():
    """Normal of deviation 0.02, cut at twice that, which leaves 0.0176; tokens of zeros."""
    table, tensors = drawn("mae.py:B,plain,fork")
    for name in (name for name in tensors if table[name].product):
        assert 0.038 < np.abs(tensors[name]).max() <= 0.04, name
        assert np.std(tensors[name]) == pytest.approx(0.0176, rel=0.08), name
    assert not tensors["encoder.prefix.class_token"].any()


def test_schedules_of_hierarchical_vits_are_those_of_their_codes():
    """Peak, first and last rate, in proportion to the batch; warm-up; and the size of images before the crop."""
    official = {  # rates for a batch, and epochs of 300
        "swin_t": (512, 5e-4, 5e-7, 5e-6, 20, 5.0, 256),
        "swinv2_t": (512, 5e-4, 5e-7, 5e-6, 20, 5.0, 292),
        "cvt_13": (2048, 8 * 2.5e-4, 1e-6, 1e-5, 5, None, 256),
        "mvitv2_t": (256, 2.5e-4, 1e-8, 1e-6, 70, 1.0, 256),
    }
    assert official.keys() == recipes.HIERARCHICAL.keys()
    for name, (batch, peak, first, last, warmup, clip, resized) in official.items():
        for options in (dict(), dict(epochs=100, batch_size=48)):
            config = configs.get_base()
            recipes.hierarchical(config, name, torus=False, **options)
            steps = 3000 // config.batch_size
            rate = schedules.create(config.schedule, total_steps=config.epochs * steps, steps_per_epoch=steps)
            at = np.array([0, warmup * config.epochs / 300 * steps, config.epochs * steps])
            expected = np.array([first, peak, last]) * config.batch_size / batch
            np.testing.assert_allclose(rate(at), expected, rtol=1e-4)  # the warm-up ends within a step
            assert config.optimizer.clip == clip
            assert {int(side / config.data.crop_ratio) for side in config.data.image_size} == {resized}


def test_convolutions_pad_as_the_shifts_are():
    """Swin has none that pads."""
    for name, fields in recipes.HIERARCHICAL.items():
        for torus in (False, True):
            config = configs.get_base()
            recipes.hierarchical(config, name, torus=torus)
            expected = "circular" if torus and not name.startswith("swin") else None
            assert config.model.get("padding") == expected, fields
    for recipe in (adaptive_cifar, adaptive_imagenet):  # adaptive models are on a torus whatever is shifted
        words = {"cvt_13,standard": None, "cvt_13,adaptive,standard": "circular", "cvt_13": "circular"}
        assert {word: recipe.get_config(word).model.get("padding") for word in words} == words


@pytest.mark.parametrize("name", ["register_vit_pico16", "jumbo_vit_pico16", "octic_jumbo_vit_ti16"])
def test_registers_and_jumbo_begin_with_the_same_head(name):
    """Zero weights, and the logit of equally likely classes."""
    config = zoo.configuration(name, num_classes=10)
    for hidden in (False, True):
        head = vit_parts.make_head(config, 24, hidden, nnx.Rngs(0))
        last = head.fc2 if isinstance(head, dense.MlpHead) else head
        assert not last.weight[...].any()
        np.testing.assert_allclose(last.bias[...], -np.log(10), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(init="xavier"), "ViT: init='xavier' is not one of normal, truncated_normal, xavier_uniform"),
        (dict(head_bias="uniform"), "ViT: head_bias='uniform' is not one of zero, prior"),
        (dict(head_std=-1.0), "ViT: head_std=-1.0 must be zero or more"),
        (dict(fc_norm=True), "fc_norm=True is for the mean of dense tokens, not for family plain with pool='class'"),
        (dict(name="octic_vit_ti16", family="D8", fc_norm=True), "not for family D8"),
        (dict(name="jumbo_vit_ti16", fc_norm=True), "not for family plain with pool='jumbo'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        zoo.configuration(**{"name": "vit_ti16", **changes})


def test_released_jumbo_models_are_evaluated_bilinearly():
    for name in ("jumbo_in1k.py:224", "jumbo_in21k.py"):
        data = load(name).data
        assert (data.interpolation, data.crop_ratio) == ("bilinear", 1.0)
