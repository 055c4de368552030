"""Jumbo on ImageNet-1k: distillation from DeiT III, 400 epochs at 128 px, then 20 at 224 px.

Source: Jumbo (arXiv 2502.15021), Section 4.1 and Appendix A.3.1; Table 12 for J and multiplier.
Expected top-1 from the paper: 128 px with lr 3e-3 / 1e-3 (Tables 7 to 11), then 224 px (Table 6).

    Jumbo, J=6     pico 62.4 / 60.8, 69.0        nano 67.7 / 68.4, 74.0         tiny 73.3 / 73.5, 78.4
                   small 79.3 / 79.3, 82.7
    16 registers   nano 53.6 / 51.9, 61.0        tiny 68.8 / 66.1, 74.5         small 78.1 / 78.2, 81.9
    8 registers    tiny 68.5 / -                 small 77.8 / -
    MobileNetV4    conv_small 62.1 / 60.0, 65.6  conv_medium 73.3 / 72.2, 74.9  hybrid_medium 74.9 / 75.2, 78.1
    SHViT          s1 63.5 / 63.5, 67.9          s2 66.6 / 66.7, 71.0           s3 70.5 / 71.2, 74.3
    EfficientViT   b0 59.5 / 60.8, 66.3          b1 71.8 / 72.8, 76.9
    BiXT           in no table

Ours: not trained yet; experiments/tables/jumbo/accuracy.py prints the tables.  Cost: not in the paper.
The training code is not public.  Not in the paper: the rate of stochastic depth (here 0; 0.1 in the public constructors
of ViTs), the parameters without weight decay (here vectors, tokens and positions), and the statistics of batch norms
(here of the whole batch, on any number of devices; --config.model.statistics_groups=N uses N groups, like N devices).
It trains every family by this recipe, which is far from their own.

    W=configs/jumbo_in1k.py D="--config.data.source=folder:imagenet" T=--config.objective.teacher
    python -m equivit.train --config=$W:tiny,lr=3e-3 $D $T=timm:deit3_base.safetensors --workdir=/tmp/tiny_128
    python -m equivit.train --config=$W:tiny,224 $D $T=timm:deit3_large.safetensors --workdir=/tmp/tiny_224 \
        --config.init=/tmp/tiny_128
    python -m equivit.train --config=$W:quicktest --workdir=/tmp/quicktest

The teachers are timm's deit3_base_patch16_224.fb_in22k_ft_in1k, and deit3_large for the second stage.
Modes, joined by commas: pico, nano, tiny, small or base (small by default); registers, and with them r=<their number,
16>; j=<J>, multiplier=<hidden width of the Jumbo MLP over its width, 4>; or instead a baseline:
efficientvit_b0 or b1, shvit_s1, s2 or s3, mobilenetv4_conv_small, conv_medium or hybrid_medium, bixt_ti_p16.  And 128
or 224 (pixels, the stage; 128 by default); lr=<peak, by default 1e-3, in the second stage 5e-5>; drop_path=<rate of
stochastic depth, 0>; quicktest, for a baseline with the smallest model of its family.  The text has J=6 for base too;
the released checkpoint has 3, the default here.
"""

from equivit.configs import recipes
from equivit.training import config

SIZES = {"pico": "pico16", "nano": "nano16", "tiny": "ti16", "small": "s16", "base": "b16"}
# The smallest model of each family of baselines, with fields that shrink it for `quicktest`; then all baselines.
SMALLEST = {"efficientvit_b0": dict(depths=(1, 1, 1, 1, 1)), "shvit_s1": dict(depths=(1, 1, 1))}
SMALLEST |= {"mobilenetv4_conv_small": dict(stages=("conv 3 s2 32", "uib 5/5 s2 e3 48, uib 0/3 e2 48", "conv 1 64"))}
SMALLEST |= {"bixt_ti_p16": dict(depth=2)}
BASELINES = (*SMALLEST, "efficientvit_b1", "shvit_s2", "shvit_s3", "mobilenetv4_conv_medium")
BASELINES += ("mobilenetv4_hybrid_medium",)


def get_config(mode: str = "small"):
    values = dict(lr=float, j=int, multiplier=float, r=int, drop_path=float)
    models = (*SIZES, *BASELINES)
    w = recipes.words(mode, "registers", "quicktest", model=models, pixels=("128", "224"), values=values)
    _check(mode, w)
    side = int(w.pixels or 128)
    c = config.get_base("distillation")
    c.epochs, c.batch_size, c.precision = 400, 1024, "mixed"
    vit = w.model not in BASELINES
    name = f"{'register' if w.registers else 'jumbo'}_vit_{SIZES[w.model or 'small']}" if vit else w.model
    c.model.update(name=name, image_size=(side, side))
    if vit:
        c.model.position_antialias = True
    c.model.update(recipes.given(registers=w.r, drop_path=w.drop_path, jumbo=w.j, jumbo_multiplier=w.multiplier))
    c.data.update(source="tfds:imagenet2012", eval_split="validation", image_size=(side, side), channels=3, workers=16)
    c.data.train_image_size = (224, 224)  # the teacher's image size
    c.data.interpolation = "bilinear"  # in evaluation, as in the released code
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, three_augment=True, color_jitter=0.3)
    c.objective.teacher = "timm:deit3_base_patch16_224.fb_in22k_ft_in1k.safetensors"
    c.objective.update(mixup=0.8, cutmix=1.0)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0)
    c.schedule.update(lr=1e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=40)
    c.checkpoint.every_steps, c.evaluation.every_epochs = 1000, 5
    if w.pixels == "224":  # the second stage
        c.epochs, c.batch_size = 20, 512
        # timm's transform, used by the public code, disables colour jitter with RandAugment.
        c.data.augment.update(three_augment=False, rand_augment="rand-m9-mstd0.5-inc1", color_jitter=0.0)
        c.objective.teacher = "timm:deit3_large_patch16_224.fb_in22k_ft_in1k.safetensors"
        c.optimizer.weight_decay = 0.1
        c.schedule.update(lr=5e-5, warmup_epochs=5)
    if w.lr is not None:
        c.schedule.lr = w.lr
    if w.quicktest:
        tiny = dict(width=48, depth=2, num_heads=3)
        if not vit:
            name = next(smallest for smallest in SMALLEST if smallest.split("_")[0] == name.split("_")[0])
            tiny = dict(name=name, **SMALLEST[name])
        recipes.small(c, num_classes=10, **tiny)
        c.data.train_image_size, c.objective.teacher = (48, 48), "zoo:vit_pico16"
    return c


def _check(mode, w):
    if w.model in BASELINES and (w.registers or (w.j, w.multiplier, w.r) != (None, None, None)):
        raise ValueError(f"config mode={mode!r}: registers, r=, j= and multiplier= are for ViTs, not for {w.model}.")
    if w.registers and (w.j, w.multiplier) != (None, None):
        raise ValueError(f"config mode={mode!r}: j= and multiplier= are for the Jumbo token; leave out 'registers'.")
    if w.r is not None and not w.registers:
        raise ValueError(f"config mode={mode!r}: r= is the number of registers; add 'registers'.")
