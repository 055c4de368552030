"""Fine-tuning of any image model on your own images.

Source: the recipe of BEiT (arXiv 2106.08254) and MAE (arXiv 2111.06377), AdamW with layer-wise decay of the learning
rate, shortened and with few augmentations for data sets of hundreds to some ten thousands of images.  Expected figures
and cost depend on the data; docs/how_to/own_images.md has an example.

    python -m equivit.train --config=configs/finetune_folder.py --workdir=runs/photos \
        --config.init=deit_3_small_224_1k.pth --config.data.source=folder:photos
    python -m equivit.train --config=configs/finetune_folder.py:head --workdir=runs/head \
        --config.init=runs/photos --config.data.source=csv:photos.csv
    python -m equivit.train --config=configs/finetune_folder.py:quicktest --workdir=/tmp/quicktest

The weights determine the model, the size of its images and their normalisation; any --config.model.KEY or
--config.data.KEY changes that.  The data determine the classes.  If they have one split alone, a fifth of each class
is held out for the evaluation; RUN/held_out.csv lists these images.

Modes, joined by commas: decay=D, the factor of the learning rate from layer to layer (0.75; 1: one rate for all);
freeze=N (the patch embedding and the first N blocks keep their weights); head (only the head is trained); quicktest.
"""

from equivit.configs import recipes
from equivit.training import config, fine_tuning

complete = fine_tuning.complete  # after the changes of the command line


def get_config(mode: str = "decay=0.75"):
    w = recipes.words(mode, "quicktest", values=dict(decay=float, freeze=int), only=("head",))
    if w.only and w.freeze is not None:
        raise ValueError(f"config mode={mode!r}: 'head' and freeze= exclude each other.")
    c = config.get_base()
    c.epochs, c.batch_size = 20, 32
    c.model = dict(drop_path=0.1)
    c.data.update(dict.fromkeys(("source", *fine_tuning.OF_WEIGHTS, *fine_tuning.OF_DATA)))
    c.data.augment.update(crop="random_resized", scale=(0.3, 1.0), flip=0.5)
    c.objective.update(loss="cross_entropy", label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.05, layer_decay=0.75 if w.decay is None else w.decay)
    if c.optimizer.layer_decay == 1:
        c.optimizer.layer_decay = None
    if w.only or w.freeze is not None:
        c.optimizer.freeze = ("*", "!head.*") if w.only else (f"{{first_{w.freeze}}}",)
    c.schedule.update(lr=1e-3 if w.only else 1.25e-4, warmup_lr=0.0, min_lr=1e-6)
    c.checkpoint.every_seconds = 300
    c.evaluation.update(every_epochs=1, suite=("accuracy",))
    if w.quicktest:
        c.model.name = "vit_ti16"
        recipes.small(c, width=48, depth=2, num_heads=2, patch_size=8, num_classes=10)
    else:
        c.init = config.Missing(
            "give the weights to start from, as --config.init=FILE or hf:ORG/NAME, a run or a saved model."
        )
        c.data.source = config.Missing(
            "give your images, as --config.data.source=folder:DIR, in a folder for each class."
        )
    return c
