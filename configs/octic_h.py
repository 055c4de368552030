"""ViT-H/14 of every family, DeiT III recipe, ImageNet-1k: Table 2 of octic ViTs.

| mode  | parameters | GFLOPs | top-1 in the paper | A100-40GB hours in the paper |
|-------|------------|--------|--------------------|------------------------------|
| H8    | 355.8 M    | 102.3  | 85.0 %             | 1760                         |
| I8    | 357.0 M    | 102.6  | 84.7 %             | 1856                         |
| D8    | 81.5 M     | 36.5   | 82.0 %             | 1824                         |
| H2    | 474.2 M    | 127.6  | 85.0 %             |                              |
| D2    | 316.1 M    | 87.2   | 84.4 %             |                              |
| plain | 632.1 M    | 167.8  | 84.6 %             |                              |

Parameters and GFLOPs are what `summarize` gives (H2, D2: attention unfused);
the paper's I8 and D8 have other invariantizations (polynomial:
362.3 M; linear: 80.5 M), see configs/octic_ablations.py.  Ours: not trained yet.

    python -m equivit.train --config=configs/octic_h.py:I8 --workdir=/tmp/octic_h
    python -m equivit.train --config=configs/octic_h.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: a family, 400 or 800 (epochs), quicktest.
"""

from configs import deit3


def get_config(mode: str = "H8"):
    words = mode.split(",")
    return deit3.recipe("H", words if set(words) & set(deit3.FAMILIES) else ["H8", *words])
