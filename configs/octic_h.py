"""ViT-H/14 of every family, DeiT III recipe, ImageNet-1k: Table 2 of octic ViTs.

| mode  | parameters | GFLOPs | top-1 in the paper | A100-40GB hours in the paper |
|-------|------------|--------|--------------------|------------------------------|
| H8    | 355.8 M    | 102.3  | 85.0 %             | 1760                         |
| I8    | 357.0 M    | 102.6  | 84.7 %             | 1856                         |
| D8    | 81.5 M     | 36.5   | 82.0 %             | 1824                         |
| H2    | 474.2 M    | 127.6  | 85.0 %             |                              |
| D2    | 316.1 M    | 87.2   | 84.4 %             |                              |
| plain | 632.1 M    | 167.8  | 84.6 %             |                              |

`summarize` gives parameters and GFLOPs (H2, D2: attention unfused).  The paper's I8 and D8 have other invariantizations
(polynomial: 362.3 M; linear: 80.5 M): configs/octic_ablations.py.  Ours: not trained yet.  configs/deit3.py has the
recipe, its sources, and differences from the public code.

    python -m equivit.train --config=configs/octic_h.py:I8 --workdir=/tmp/octic_h
    python -m equivit.train --config=configs/octic_h.py:quicktest --workdir=/tmp/quicktest

The suite prints the top-1 after rotating each image by a random multiple of 90 degrees as "randomly rotated".  Changes
in Table 2, in points: H8 -13.4, I8 and D8 0.0, plain -12.6.  There the paper's plain model is the public one with 800
epochs, from github.com/facebookresearch/deit, README_revenge.md (85.2 % upright):

    python -m equivit.convert --source=timm --input=deit_3_huge_224_1k.pth --output=models/deit3_h14
    python -m equivit.evaluate --model=models/deit3_h14 --config=configs/octic_h.py:plain --suite=orientation

Modes, joined by commas: a family (H8 by default), 400 or 800 (epochs), quicktest.
"""

from equivit.configs import deit3, recipes


def get_config(mode: str = "H8"):
    w = recipes.words(mode, "quicktest", family=recipes.FAMILIES, epochs=("400", "800"))
    return deit3.recipe("H", w.family or "H8", long=w.epochs == "800", quicktest=w.quicktest)
