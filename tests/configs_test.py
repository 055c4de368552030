"""Every full configuration is built for eight devices and its loss traced; the steps of some are lowered.

tests/recipes runs or lowers a small step of each file.
"""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import convert, evaluate, pretrained
from equivit.data import loader
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from equivit.models.model import check_input
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Step
from equivit.training import build, sharding
from equivit.training import config as configs
from tests.pretrained import torch_archive

ROOT = pathlib.Path(__file__).parents[1] / "configs"
SHARED = ("__init__.py", "recipes.py")
# Millions of trained parameters: octic ViTs, Table 2, and facts of the recipes (I8 and D8 with the power spectrum).
FULL = {
    "deit3.py": 304.37,
    "adaptive_imagenet.py:swinv2_t,adaptive,standard": 28.35,  # as the ordinary model
    "adaptive_ade20k.py:adaptive": 59.94,  # UperNet with Swin-T
    "segment.py:vit_s16": 22.06,  # without a class head, and a linear decoder of 1,000 classes
    "octic_h.py:H8": 355.78,
    "octic_h.py:I8": 357.01,
    "octic_h.py:D8": 81.54,
    "octic_h.py:H2": 474.19,
    "octic_h.py:D2": 316.15,
    "octic_h.py:plain,800": 631.95,  # positions of an 11x11 grid
    "deit3.py:S": 22.06,
    "deit3.py:B,800": 86.55,
    "deit3.py:L,H8": 171.32,
    "deit3.py:L,I8": 172.11,
    "deit3.py:L,D8,800": 39.85,
    "octic_ablations.py:I8,invariant=polynomial": 175.52,
    "octic_ablations.py:D8,invariant=linear": 39.20,
    "octic_ablations.py:H8,k=6": 237.44,
    "octic_finetune.py:H,H8": 355.78,  # positions trained at the new grid: as octic_h.py at 224 px
    "octic_finetune.py:L,I8,384": 172.18,  # those of a 24x24 grid
    "mae.py:B,plain": 111.66,  # as the official model without its two fixed tables
    "mae.py:L,jumbo,fork": 404.90,
    "jumbo_in1k.py:nano": 8.010,  # the released 8.142 M, with the head and the norms of the paper, at 128 px
    "jumbo_in1k.py:shvit_s1": 6.331,  # these as in timm
    "jumbo_in1k.py:efficientvit_b1": 9.102,
    "jumbo_in1k.py:mobilenetv4_hybrid_medium,224": 11.075,
    "jumbo_in1k.py:bixt_ti_p16": 15.121,  # and this as the official model
    "jumbo_in21k.py:base": 152.47,
    "finetune.py:L,plain": 304.13,  # ViT-L of 304.33 M, its positions not trained
    # Backbones without a head, and a head of 23.663 M with 65,536 prototypes; DinoBloom has two.
    "dinov2.py:L,plain": 327.01,
    "dinov2.py:L,D8": 62.49,
    "dinobloom.py:I8": 218.41,
    "depthwise.py:coco": 307.90,  # ViT-L/14 of patches alone, without its positions, and the decoder
    "linear_probe.py:B,jumbo": 2.305,  # the head: 2304 x 1000 weights and 1000 biases
}
# No paper has these: they are counts of this code, kept so that a change is noticed.
OURS = {"cifar.py:10,H8": 3.02, "cifar.py:100,D8": 0.73, "mae.py:I8": 52.00, "mae.py:jumbo,D8": 19.42}


EVERY = {**FULL, **OURS}
# Lowering a step at full size takes seconds: of each objective one is lowered, and others whose programs differ in more
# than sizes and groups.
LOWERED = {"octic_h.py:H8", "octic_h.py:D8", "deit3.py", "jumbo_in1k.py:nano", "mae.py:I8", "mae.py:L,jumbo,fork"}
LOWERED |= {"adaptive_ade20k.py:adaptive", "dinov2.py:L,plain", "dinobloom.py:I8", "depthwise.py:coco"}
LOWERED |= {"linear_probe.py:B,jumbo"}


@pytest.mark.slow
@pytest.mark.parametrize("name,millions", EVERY.items())
def test_full_configuration(name, millions):
    config = configs.load(str(ROOT / name))
    classes = config.model.get("num_classes", 1000)
    with config.unlocked():
        config.model.update(num_classes=classes, in_channels=3)
        config.mesh.fsdp = 8
        config.batch_size = -(-config.batch_size // 8) * 8
    teachers = {"teacher": zoo.abstract("vit_b16")} if "teacher" in config.objective else {}
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        run = build.make_program(config, mesh, total=625 * 400, per_epoch=625, teachers=teachers)
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.abstract.trainable)) / 1e6
        assert abs(count - millions) < 0.02, f"{count:.3f} M"
        assert {leaf.dtype for leaf in jax.tree.leaves(run.abstract.trainable)} == {jnp.dtype("float32")}
        if config.objective.name == "dinov2":  # student, teacher and moments
            shares = [math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(run.abstract)]
            assert sum(shares) <= sum(a.size for a in jax.tree.leaves(run.abstract)) / 7
        entries = dict(entries=run.objective.entries, transform=run.objective.transform_of(config))
        batch = loader.shapes(config.data, config.batch_size, channels=3, **entries)
        if name in LOWERED:
            assert "sharding" in run.lower(batch).as_text()
        else:
            assert loss_of(run, teachers, batch).shape == ()


def loss_of(run, teachers, batch):
    """The loss of a batch, traced without its gradient."""

    def loss(state, arrays, batch, key):
        batch = run.objective.prepare(run.module, batch, key)
        models = {name: run.objective.holding(model, arrays[name]) for name, model in teachers.items()}
        step = Step(key, Clock(state.step, 625 * 400, 625), run.static(0.0), state.extra, models)
        with recording():
            return run.objective.loss(run.objective.holding(run.module, state.arrays), batch, step).value

    return jax.eval_shape(loss, run.abstract, run.teachers, batch, jax.random.key(0))


QUICK = sorted(path.name for path in ROOT.glob("*.py") if path.name not in (*SHARED, "timeseries.py"))


@pytest.mark.parametrize("name", QUICK)
def test_a_quicktest_fits_eight_devices(name):
    config = configs.load(f"{ROOT / name}:quicktest")
    sharding.check_batch(config.batch_size, config.optimizer.accumulation, sharding.create_mesh(config.mesh))


SEGMENTED = [f"adaptive_ade20k.py:{name}{shifts}" for name in ("swin_t", "swinv2_t") for shifts in ("", ",standard")]
SEGMENTED += [f"segment.py:{name}" for name in ("swin_t", "swinv2_t", "cvt_13", "mvitv2_t", "vit_s16", "octic_vit_s16")]


@pytest.mark.parametrize("adaptive", ["", ",adaptive"])
@pytest.mark.parametrize("name", SEGMENTED)
def test_every_model_of_segmentation_takes_the_images_of_its_recipe(name, adaptive):
    """In training, and in evaluation images whose sides are multiples of `data.multiple`."""
    config = configs.load(f"{ROOT / name}{adaptive}")
    with config.unlocked():
        config.model.update(num_classes=150, in_channels=3)
    model = build.model_configuration(config)
    build.make_objective(config).check_model(model, {})
    check_input(model, "data.multiple", (config.data.multiple,) * 2, 3)


@pytest.mark.parametrize(
    "name,message",
    [
        ("octic_h.py:H9", "config mode='H9' is not one of plain, H8"),
        ("octic_ablations.py:k=six", "config mode='k=six': 'six' is not a whole number"),
        ("octic_ablations.py:D8,depth=3", "config mode='depth=3' is not one of"),
        ("jumbo_in1k.py:smal", "config mode='smal' is not one of pico, nano.*the nearest is 'small'"),
        ("jumbo_in1k.py:j=six", "'six' is not a whole number"),
        ("jumbo_in21k.py:registers,lora", "'lora' is for the Jumbo token"),
        ("cifar.py:1000", "config mode='1000' is not one of"),
        ("cifar.py:10,H8,400", "config mode='400' is not one of"),
        ("quickstart.py:H8,800", "config mode='800' is not one of"),
        ("linear_probe.py:B,jumbo,800", "config mode='800' is not one of"),
        ("finetune.py:B,jumbo,lr=3e-3", "lr= and wd= are for the scripts of the fork; add 'fork'"),
        ("octic_finetune.py:L,H8,400", "config mode='400' is not one of"),
        ("deit3.py:L,H8,400,D8", "'H8' and 'D8' exclude each other"),
        ("deit3.py:S,L", "'S' and 'L' exclude each other"),
        ("octic_ablations.py:k=6,k=8", "'k=6' and 'k=8' exclude each other"),
        ("octic_ablations.py:H8,invariant=linear", "invariant= is for I8, D8 and D2; H8 has no"),
        ("jumbo_in1k.py:registers,j=3", "j= and multiplier= are for the Jumbo token"),
        ("jumbo_in1k.py:r=8", "r= is the number of registers; add 'registers'"),
        ("jumbo_in1k.py:shvit_s1,registers", "registers, r=, j= and multiplier= are for ViTs, not for shvit_s1"),
        ("jumbo_in1k.py:tiny,shvit_s1", "'tiny' and 'shvit_s1' exclude each other"),
        ("jumbo_in21k.py:wide", "'wide' is for registers; add 'registers'"),
        ("deit3.py:L,H8,", "config mode='' is not one of"),
        ("adaptive_cifar.py:adapted=0", "adapted=0 must be positive, a number of epochs"),
        ("adaptive_cifar.py:augmented", "'augmented' is for standard shifts; add 'standard'"),
        ("adaptive_cifar.py:10,swin_t,cvt_13", "'swin_t' and 'cvt_13' exclude each other"),
        ("adaptive_ade20k.py:unpool", "'unpool' has no effect here; add 'adaptive'"),
        ("adaptive_ade20k.py:standard,ratio", "'ratio' has no effect here; leave it out, standard shifts have it"),
        ("depthwise.py:stage2,dinov2_b14,paper", "'paper' is for dinov2_l14 in stage2, frozen or one_stage"),
        ("depthwise.py:paper_heads", "'paper_heads' is for dinov2_l14 in stage2, frozen or one_stage"),
        ("depthwise.py:bert", "'bert' is for gates; add 'gated'"),
        ("depthwise.py:voc", "config mode='voc' is not one of coco, ade20k, in1k"),
        ("segment.py:swin_s", "config mode='swin_s' is not one of swin_t, .*; the nearest is 'swin_t'"),
        ("adaptive_imagenet.py:swin_s", "config mode='swin_s' is not one of swin_t, .*; the nearest is 'swin_t'"),
    ],
)
def test_bad_modes_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        configs.load(str(ROOT / name))


@pytest.mark.parametrize(
    "name,key,value",
    [
        ("jumbo_in1k.py:tiny,224,lr=3e-3", "schedule.lr", 3e-3),
        ("jumbo_in1k.py:tiny,224", "schedule.lr", 5e-5),
        ("mae.py:cifar,1600", "epochs", 1600),
        ("mae.py:L,1600", "epochs", 1600),
        ("deit3.py:L,H8", "objective.mix_groups", 16),
        ("deit3.py:L,D2", "objective.mix_groups", 32),
        ("deit3.py:S", "schedule.lr", 4e-3),
        ("deit3.py:B,800", "model.drop_path", 0.2),
        ("octic_h.py:I8", "objective.mix_groups", 32),
        ("octic_finetune.py:L,I8", "objective.mix_groups", 8),
        ("octic_finetune.py:H,H8", "objective.mix_groups", 16),
        ("finetune.py:L,plain", "objective.mix_groups", 32),
        ("finetune.py:B,jumbo,fork,wd=0.0", "optimizer.weight_decay", 0.0),
        ("linear_probe.py:B,jumbo,fork", "schedule.warmup_lr", 1e-6),
        ("linear_probe.py:B,jumbo,fork", "schedule.min_lr", 1e-5),
        ("linear_probe.py:B,jumbo", "schedule.min_lr", 0.0),
        ("deit3.py:L,H8,quicktest", "objective.mix_groups", 4),
        ("jumbo_in1k.py:nano,registers,r=8", "model.registers", 8),
        ("jumbo_in1k.py:nano,drop_path=0.1", "model.drop_path", 0.1),
        ("jumbo_in1k.py:mobilenetv4_conv_medium,224", "model.image_size", (224, 224)),
        ("jumbo_in1k.py:shvit_s3,lr=3e-3", "schedule.lr", 3e-3),
        ("jumbo_in1k.py:efficientvit_b1,quicktest", "model.name", "efficientvit_b0"),
        ("jumbo_in21k.py:drop_path=0.1", "model.drop_path", 0.1),
        ("deit3.py:L,H8", "precision", "mixed"),
        ("deit3.py:L,H8,quicktest", "precision", "float32"),
        ("adaptive_cifar.py:100,swin_t", "data.source", "tfds:cifar100"),
        ("adaptive_cifar.py:swinv2_t", "model.image_size", (256, 256)),
        ("adaptive_cifar.py:per_gpu", "batch_size", 96),
        ("adaptive_cifar.py:swinv2_t,adaptive", "model.adaptive", True),
        ("adaptive_cifar.py:adapted=20", "model.adaptive", True),
        ("adaptive_cifar.py:adapted=20", "epochs", 20),
        ("adaptive_imagenet.py:adaptive", "model.adaptive", True),
        ("adaptive_cifar.py:da", "data.augment.circular_shift", 1.0),
        ("adaptive_cifar.py:circular", "evaluation.shift.kinds", ("circular",)),
        ("adaptive_cifar.py:standard", "evaluation.shift.ranges", (42,)),
        ("adaptive_cifar.py:standard", "data.augment.rand_augment", None),
        ("adaptive_cifar.py:standard,augmented", "data.augment.rand_augment", "rand-m9-n2-mstd0.5-inc1"),
        ("adaptive_imagenet.py:standard", "data.augment.erase", 0.25),
        ("adaptive_imagenet.py:standard", "evaluation.shift.kinds", ("crop",)),
        ("adaptive_imagenet.py:da", "data.augment.circular_shift", 1.0),
        ("adaptive_ade20k.py:swinv2_t", "data.fit", (2048, 512)),
        ("adaptive_ade20k.py:swin_t", "data.fit", (1792, 448)),
        ("adaptive_ade20k.py:ratio", "data.augment.fit_ratio", (0.5, 2.0)),
        ("adaptive_ade20k.py:adaptive,unpool", "objective.upsampling", "unpool"),
        ("adaptive_ade20k.py:circular", "objective.padding", "circular"),
        ("adaptive_ade20k.py:standard", "objective.padding", "zeros"),
        ("adaptive_ade20k.py:standard,adaptive", "data.multiple", 224),
        ("segment.py:frozen", "objective.frozen", True),
        ("segment.py:cvt_13,linear", "objective.decoder", "linear"),
        ("segment.py:adaptive", "objective.equivariant", True),
        ("segment.py:octic_vit_s16", "model.family", "D8"),
        ("depthwise.py:ade20k", "data.image_size", (336, 448)),
        ("depthwise.py:in1k,mae_b16", "objective.loss", "cross_entropy"),
        ("depthwise.py:clip_l14", "data.std", (0.26862954, 0.26130258, 0.27577711)),
        ("depthwise.py:stage2,quicktest", "model.replaced", ((0,),)),
        ("depthwise.py:gated,clip_l14", "objective.gates", 12),
        ("depthwise.py:gated", "objective.gate_lr", 0.01),
        ("depthwise.py:stage2,paper", "model.replaced", tuple((i,) for i in (1, *range(3, 14)))),
        ("depthwise.py:ade20k,clip_b16", "objective.blocks", (2, 5, 8)),
        ("depthwise.py:gated,bert", "objective.temperature", (1000.0, 1e-3)),
    ],
)
def test_every_word_of_a_mode_counts(name, key, value):
    begun = ["init=/tmp/run"] if "adapted=" in name else []
    assert configs.flat(configs.load(str(ROOT / name), begun))[key] == value


def test_a_model_is_not_adapted_from_random_weights():
    with pytest.raises(ValueError, match=r"config\.init is missing: give the ordinary model to fine-tune, .*--config"):
        configs.load(str(ROOT / "adaptive_cifar.py:cvt_13,adapted=20"))
    assert configs.load(str(ROOT / "adaptive_cifar.py:cvt_13,adapted=1,quicktest")).init is None


@pytest.mark.parametrize("name", [path.name for path in ROOT.glob("*.py") if path.name not in SHARED])
def test_a_recipe_is_one_page(name):
    """octic_h.py and octic_ablations.py take the one recipe of DeiT III."""
    imported = "deit3, recipes" if name in ("octic_h.py", "octic_ablations.py") else "recipes"
    assert set(re.findall(r"^from equivit.configs import (.+)$", (ROOT / name).read_text(), re.MULTILINE)) == {imported}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "patch"), [("deit3.py", "l", 16), ("octic_h.py", "h", 14)])
def test_the_commands_for_public_weights_in_a_header_work(name, size, patch, tmp_path, monkeypatch, capsys):
    """The header's own words, on a tiny model in the layout of the public files, as far as the data."""
    lines = re.findall(r"^    python -m equivit\.(convert|evaluate) (.+)$", (ROOT / name).read_text(), re.MULTILINE)
    commands = {command: arguments.split() for command, arguments in lines}
    shapes = zoo.abstract("vit_ti16", width=96, depth=1, num_heads=3, patch_size=patch)
    tiny = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    monkeypatch.chdir(tmp_path)
    torch_archive.write(
        tmp_path / f"deit_3_{size}.pth", {"model": pretrained.state_dict("timm", tiny, flavour="deit3")}
    )
    commands["convert"][1] = f"--input=deit_3_{size}.pth"
    assert convert.main(commands["convert"]) == 0
    commands["evaluate"][1] = f"--config={ROOT / name}:plain"
    assert evaluate.main([*commands["evaluate"], "--config.data.source=folder:nowhere"]) == 1
    output = capsys.readouterr()
    assert "Evaluating orientation of models/deit3_" in output.out and "images of 224x224" in output.out
    assert "nowhere" in output.err
