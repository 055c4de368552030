"""Public ViTs fine-tuned, then fine-tuned again with convolution in place of attention in some blocks.

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution", Sections 3 and A.2.1, and its code
github.com/cscribano/DWConv_VFM, which has modules and configs, but no training, decoder or weights.
Expected, from its Tables 2 to 5 and A.1: mean IoU on COCO and ADE20K, top-1 accuracy on ImageNet-1k, in %.  Stage 2 has
depthwise convolution (dw) in the half of the blocks with the lowest Sigma, unless stated otherwise.

| backbone   | coco stage1 | stage2 | ade20k stage1 | stage2 | in1k stage1 | stage2 |
|------------|-------------|--------|---------------|--------|-------------|--------|
| dinov2_l14 | 66.03       | 65.95  | 56.84         | 56.05  | 86.22       | 85.45  |
| dinov2_b14 | 63.37       | 62.22  | 53.83         | 51.70  | 83.76       | 82.00  |
| mae_l16    | 60.22       | 59.81  |               |        |             |        |
| mae_b16    | 58.84       | 57.91  |               |        |             |        |
| clip_l14   | 64.65       | 62.17  |               |        |             |        |
| clip_b16   | 61.52       | 59.06  |               |        |             |        |

dinov2_l14 on COCO: conv in 12 blocks 65.84, spvit in 10 65.05, ens_dw in 10 64.81 and in 12 63.92, dw in 16 64.64, in
17 63.77, in the 12 of highest Sigma 61.46, in 192 single heads 65.52; one_stage 65.63; frozen 65.12, which trains
25.3 M parameters of 284.4 M; gated (DSP-e2e) with 12 blocks 64.15, 17 blocks 58.25, 192 heads 62.32, and stage2 with
their selection (DSP-2S) 64.00, 64.20, 65.79.  Ours: not trained yet.  Cost: not in the paper.

    python -m equivit.train --config=configs/depthwise.py:coco,dinov2_l14,stage1 --workdir=/tmp/stage1 \
        --config.init=dinov2:dinov2_vitl14_pretrain.pth --config.data.source=coco:/data/coco
    python -m equivit.train --config=configs/depthwise.py:coco,dinov2_l14,stage2,paper --workdir=/tmp/stage2 \
        --config.init=/tmp/stage1 --config.data.source=coco:/data/coco
    python -m equivit.train --config=configs/depthwise.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: coco (by default), ade20k or in1k; a backbone of the table (by default dinov2_l14); quicktest,
which replaces the first of two blocks; the stage:
- stage1 (by default): attention everywhere, from public weights, without the class token.
- stage2: from stage 1, with its decoder, half of its epochs and half of its batch, at the same learning rate.
- frozen: stage 2, training only the replaced modules.
- one_stage: blocks replaced directly in the public weights, trained as long as stage 1.
- gated: stage 2 with gates that learn which modules to replace (`equivit/objectives/gated.py`): objective.gates blocks,
  by default half of them, or single heads with objective.by_head=True.  The temperature takes 30 epochs in the released
  code, more than stage 2 on ImageNet has.  gated,bert has the start, rate and temperature of Differentiable Subset
  Pruning for BERT, cooled over the whole run.
All but stage1 and gated need model.replaced: entries (block, kind, kernel size, heads, form), optional after the block,
such as ((3,), (5, "ens_dw"), (8, "dw", 3, (0, 2))).  For dinov2_l14, the words paper and paper_heads give the 12 blocks
and the 192 heads that the authors selected on COCO (`equivit/depthwise/published.py`).  For other models,
`equivit.depthwise.selection.select(selection.sigma(model, batches).blocks, 12)` gives the blocks of lowest Sigma, of
the backbone of stage 1 and training images.  A gated run has its selection in
`checkpoints.load_run(path).model.backbone.config.replaced`.

Choices that neither the paper nor its code gives:
- Learning rate, its warm-up and final value, weight decay, clipping (schedule.*, optimizer.*); batch 1024 on ImageNet.
- The classes of COCO: 80 things and the background (data/coco.py, also for overlapping objects).
- The decoder: it reads the mean of its four maps, and has widths of 256, 128 and 64 (objective.width), derived from
  the parameters in Table A.1.
- Crop scale and colour strength (data.augment); evaluation of images with another shape than the model's: squashed for
  label maps, cropped for ImageNet (data.eval_crop).  Label maps are not mirrored, as Section A.2.1 does not list it.
- Resizing of labels to the decoder's maps, of 192x192 entries for patches of 14 pixels and 168x168 for 16: nearest.
- The length of one_stage.
- The last epoch counts.

As in the code: positions are resized with antialiasing, and frozen; drop path grows to 0.1; the decoder reads the maps
of objective.blocks and of the last block, each after the final norm.  Different from it:
- Biases of new convolutions start at 0, not at random.
- Gates of the kind spvit project its branch once; the code does so twice.
- The grid of tokens follows the image, which need not be square.
- Heads listed in model.replaced are replaced; the code checks a class for being an instance, and ignores its own lists.
- Products are in bfloat16; the code trains in float16, which --config.precision=float16 selects.
"""

from equivit.configs import recipes
from equivit.depthwise import published
from equivit.training import config

PATCHES_ONLY = dict(class_token=False, class_position=False, registers=0, mask_token=False, pool="mean")
RESIZED = dict(position_antialias=True, position_offset=0.0)
CLIP_PIXELS = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
MAE = dict(position="sincos", layer_scale=None, class_token=False, pool="mean")
BACKBONES = {f"dinov2_{size}": dict(name=f"dinov2_vit_{size}", **PATCHES_ONLY, **RESIZED) for size in ("b14", "l14")}
BACKBONES |= {f"mae_{size}": dict(name=f"vit_{size}", **MAE) for size in ("b16", "l16")}
BACKBONES |= {f"clip_{size}": dict(name=f"clip_vit_{size}", projection=None, **PATCHES_ONLY) for size in ("b16", "l14")}
SEGMENTED = {
    "coco": dict(source="coco:coco", split="train2017", eval_split="val2017", image_size=(336, 336)),
    "ade20k": dict(source="pairs:ADEChallengeData2016", split="training", eval_split="validation"),
}
DEPTH = {backbone: 24 if "l1" in backbone else 12 for backbone in BACKBONES}
BERT = dict(gate_start="xavier", gate_lr=0.5, temperature=(1000.0, 1e-3), cooling=None)
ONLY_REPLACED = ("*", "!*blocks.{replaced}.attention.*")
WANTED = config.Missing(
    "give the blocks to replace, such as --config.model.replaced='((3,), (5,))'; train stage1 first, and select the "
    "blocks of lowest Sigma, as in the header of configs/depthwise.py; or, for dinov2_l14, add the word paper."
)
CHOSEN = {  # by word
    "paper": tuple((block,) for block in sorted(published.BLOCKS)),
    "paper_heads": tuple((block, "dw", 3, heads) for block, heads in published.HEADS.items()),
}


def get_config(mode: str = "coco,dinov2_l14,stage1"):
    w = _words(mode)
    task, backbone, stage = w.task, w.backbone, w.stage
    c = config.get_base(("gated_" if stage == "gated" else "") + ("supervised" if task == "in1k" else "segmentation"))
    c.epochs, c.batch_size, c.precision = (50 if task == "in1k" else 100), 1024, "mixed"
    c.model = dict(BACKBONES[backbone], image_size=(336, 448 if task == "ade20k" else 336), drop_path=(0.0, 0.1))
    c.data.update(channels=3, image_size=c.model.image_size, workers=16)
    c.data.update(CLIP_PIXELS if backbone.startswith("clip") else {})
    c.data.augment.crop = "random_resized"
    if task == "in1k":
        c.data.update(source="tfds:imagenet2012", eval_split="validation")
        c.objective.loss = "cross_entropy"
    else:
        c.model.num_classes = 81 if task == "coco" else 150
        c.data.update(SEGMENTED[task], eval_crop="squash")
        c.data.augment.update(flip=0.0, color_jitter=0.3)
        c.objective.update(
            decoder="convolutions", width=256, own_size=True, auxiliary=0.0, blocks=read(DEPTH[backbone])
        )
        c.evaluation.suite = ("segmentation",)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0, freeze=("{positions}",))
    c.schedule.update(lr=1e-4, warmup_lr=0.0, min_lr=0.0, warmup_epochs=5)
    c.checkpoint.every_steps, c.evaluation.every_epochs = 500, 5
    if stage in ("stage2", "frozen", "gated"):
        c.epochs, c.batch_size = c.epochs // 2, c.batch_size // 2
    if stage == "frozen":
        c.optimizer.freeze = ONLY_REPLACED
    if stage == "gated":
        c.objective.gates = 1 if w.quicktest else DEPTH[backbone] // 2
        c.objective.update(BERT if w.bert else {})
    elif stage != "stage1":
        c.model.replaced = ((0,),) if w.quicktest else CHOSEN.get(w.chosen, WANTED)
    if w.quicktest:
        tiny = dict(width=48, depth=2, num_heads=2, patch_size=16)
        segmented = dict(source="synthetic_maps", num_classes=2) if task != "in1k" else dict(num_classes=10)
        recipes.small(c, **tiny, **segmented)
        if task != "in1k":
            c.objective.update(width=16, blocks=read(tiny["depth"]))
    return c


def _words(mode: str):
    """The words of the mode with their defaults."""
    stages, tasks = ("stage1", "stage2", "frozen", "one_stage", "gated"), (*SEGMENTED, "in1k")
    w = recipes.words(mode, "quicktest", "bert", task=tasks, backbone=BACKBONES, stage=stages, chosen=CHOSEN)
    w.task, w.backbone, w.stage = w.task or "coco", w.backbone or "dinov2_l14", w.stage or "stage1"
    if w.bert and w.stage != "gated":
        raise ValueError(f"config mode={mode!r}: 'bert' is for gates; add 'gated'.")
    if w.chosen and (w.backbone != "dinov2_l14" or w.stage in ("stage1", "gated")):
        raise ValueError(f"config mode={mode!r}: {w.chosen!r} is for dinov2_l14 in stage2, frozen or one_stage.")
    return w


def read(depth: int) -> tuple[int, ...]:
    """The blocks that the decoder reads beside the last: 4, 11 and 17 of 24, or the same shares, rounded up."""
    blocks = (-(-share * depth // 24) - 1 for share in (5, 12, 18))
    return tuple(dict.fromkeys(block for block in blocks if block < depth - 1))
