"""Ablations of octic ViTs on ViT-L/16: number of octic blocks (Figure 4b) and invariantization (Table 4).

Table 4, D8, top-1 / top-5 in the paper: linear 79.2 / 94.7, polynomial 79.4 / 94.8, triple_correlation 76.8 / 93.7,
canonisation 79.5 / 94.9, max_filtering 77.9 / 93.9, power_spectrum 79.5 / 94.9.  Figure 4b, H8 and I8 over k of 24
blocks: the paper uses k = 12; I8 is worse for small k.  Ours: not trained yet.  configs/deit3.py has the recipe and its
differences from the public code.
Cost in the paper: 3840 A100-40GB hours for the invariantizations, about 1950 for each family of Figure 4b.

    python -m equivit.train --config=configs/octic_ablations.py:I8,k=6 --workdir=/tmp/i8_k6
    python -m equivit.train --config=configs/octic_ablations.py:D8,invariant=canonisation --workdir=/tmp/d8_canonisation
    python -m equivit.train --config=configs/octic_ablations.py:quicktest --workdir=/tmp/quicktest

experiments/tables/octic/number_of_blocks.py draws Figure 4b from the runs, invariants.py prints Table 4.
Modes, joined by commas: a family (D8 by default), k=<octic blocks>, invariant=<kind>, 400 or 800 (epochs), quicktest.
"""

from equivit.configs import deit3, recipes


def get_config(mode: str = "D8"):
    values = dict(k=int, invariant=str)
    w = recipes.words(mode, "quicktest", family=recipes.FAMILIES, epochs=("400", "800"), values=values)
    family = w.family or "D8"
    if w.invariant is not None and family[0] not in "ID":
        raise ValueError(f"config mode={mode!r}: invariant= is for I8, D8 and D2; {family} has no invariantization.")
    c = deit3.recipe("L", family, long=w.epochs == "800", quicktest=w.quicktest)
    k = w.k if w.k is None or not w.quicktest else min(w.k, 2)
    c.model.update(recipes.given(equivariant_blocks=k, invariant=w.invariant))
    return c
