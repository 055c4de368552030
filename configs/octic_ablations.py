"""Ablations of octic ViTs on ViT-L/16: how many octic blocks (Figure 4b), and which invariantization (Table 4).

Table 4, D8, top-1 / top-5 in the paper: linear 79.2 / 94.7, polynomial 79.4 / 94.8, triple_correlation 76.8 / 93.7,
canonisation 79.5 / 94.9, max_filtering 77.9 / 93.9, power_spectrum 79.5 / 94.9.  Figure 4b, H8 and I8 over k of 24
blocks: the paper takes k = 12; I8 is worse for small k.  Ours: not trained yet.
Cost, from the paper: 3840 A100-40GB hours for the invariantizations, about 1950 for each family of Figure 4b.

    python -m equivit.train --config=configs/octic_ablations.py:I8,k=6 --workdir=/tmp/i8_k6
    python -m equivit.train --config=configs/octic_ablations.py:D8,invariant=canonisation --workdir=/tmp/d8_canonisation
    python -m equivit.train --config=configs/octic_ablations.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: a family, k=<octic blocks>, invariant=<kind>, 400 or 800 (epochs), quicktest.
"""

from configs import deit3


def get_config(mode: str = "D8"):
    words = deit3.check(mode.split(","), more=("k", "invariant"))
    options = dict(word.split("=", 1) for word in words if "=" in word)
    words = [word for word in words if "=" not in word]
    model = {}
    if "k" in options:
        if not options["k"].isdigit():
            raise ValueError(f"octic_ablations: k={options['k']!r} must be a number of blocks, 0 to 24.")
        model["equivariant_blocks"] = int(options["k"])
    if "invariant" in options:
        model["invariant"] = options["invariant"]
    return deit3.recipe("L", words if set(words) & set(deit3.FAMILIES) else ["D8", *words], **model)
