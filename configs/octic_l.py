"""ViT-L/16 of every family, DeiT III recipe, ImageNet-1k: Table 2 of octic ViTs.

| mode  | parameters | GFLOPs | top-1 in the paper | A100-40GB hours in the paper |
|-------|------------|--------|--------------------|------------------------------|
| H8    | 171.3 M    | 37.7   | 84.5 %             | 624                          |
| I8    | 172.1 M    | 37.8   | 84.0 %             | 592                          |
| D8    | 39.9 M     | 13.5   | 79.5 %             | 576                          |
| H2    | 228.3 M    | 47.0   | 84.5 %             |                              |
| D2    | 152.2 M    | 32.2   | 83.4 %             |                              |
| plain | 304.4 M    | 61.8   | 84.2 %             |                              |

Parameters and GFLOPs are what `summarize` gives (H2, D2: attention unfused);
the paper's I8 and D8 have other invariantizations (polynomial:
175.5 M; linear: 39.2 M), see configs/octic_ablations.py.  Ours: not trained yet.

    python -m equivit.train --config=configs/octic_l.py:H8 --workdir=/tmp/octic_l
    python -m equivit.train --config=configs/octic_l.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: a family, 400 or 800 (epochs), quicktest.
"""

from configs import deit3


def get_config(mode: str = "H8"):
    words = mode.split(",")
    return deit3.recipe("L", words if set(words) & set(deit3.FAMILIES) else ["H8", *words])
