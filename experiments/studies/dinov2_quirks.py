"""How each quirk and choice of the public DINOv2 code changes the numbers of one step.

    python -m experiments studies.dinov2_quirks  # synthetic images, plain and I8
    python -m experiments studies.dinov2_quirks --source=npz:/data/pbc_wbc96.npz

One step of the small recipe (four blocks, 48 px, 16 images in two groups, stochastic depth at 0.3, weight decay at its
last value), always from the same parameters and images, with one option changed at a time.  The table has loss,
gradient norm, and how far the step ends from the small recipe's step, relative to its length.
"""

import math
import pathlib
from collections.abc import Mapping

import jax
import numpy as np

from equivit.training import config as configs
from equivit.training import sharding
from experiments import compiled_models, findings, flags

BASE = ["batch_size=16", "objective.groups=2", "model.drop_path=0.3", "model.drop_path_groups=2"]
BASE += ["objective.prototypes_start=0", "objective.fixed_gains=False"]
BASE += ["optimizer.weight_decay=0.4", "optimizer.weight_decay_end=None"]
BASE += ["schedule.warmup_epochs=None", "schedule.name=constant"]
EVERY = {
    "blur at 0, 0.9, 0.5, the public code's": ["data.views.blur=(0.0,0.9,0.5)"],
    "decay by name: also of positions, tokens, gains": ["objective.decay=by_name"],
    "gains of the prototypes fixed": ["objective.fixed_gains=True"],
    "prototypes stand still": ["objective.prototypes_start=1000"],
    "targets by centering": ["objective.targets=centering"],
    "one group in place of two": ["objective.groups=1", "model.drop_path_groups=1"],
    "student in mixed precision": ["precision=mixed"],
    "student in bfloat16 throughout": ["precision=bfloat16"],
}
PLAIN = {"positions resized with an offset of 0.1": ["model.position_offset=0.1"]}
OCTIC = {
    "layer scales begin at 1e-4": ["model.layer_scale=1e-4"],
    "octic branches dropped sample by sample": ["model.drop_path_fields=samples"],
}
FAMILIES = {"plain": EVERY | PLAIN, "H8": EVERY | OCTIC, "I8": EVERY | OCTIC}


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("--source", default="synthetic", help="of the images (%(default)s)")
    parser.add_argument("--families", default=["plain", "I8"], type=flags.one_of(list(FAMILIES)), help="(plain,I8)")
    options = parser.parse_args(arguments)
    found = {family: quirks(family, options.source) for family in options.families}
    results = dict(source=pathlib.PurePath(options.source).name, base=BASE, families=found)
    return findings.finish(options, results, [])


def quirks(family: str, source: str) -> list[dict]:
    """A row for the unchanged step and one for each option, printed at once."""
    texts = [*BASE, f"data.source={source}"]
    print(f"\n{family}")
    rows, reference = [], {}
    for name, changed in {"the small recipe": [], **FAMILIES[family]}.items():
        movement, metrics = step(family, [*texts, *changed])
        reference = reference or movement
        row = dict(option=name, loss=float(metrics["loss"]), gradient=float(metrics["grad_norm"]))
        rows.append(row | dict(change=distance(movement, reference)))
        print("  {option:50} loss {loss:.4f}  gradient {gradient:.3f}  change {change:.2g}".format(**rows[-1]))
        jax.clear_caches()
    return rows


def step(family: str, texts: list[str]) -> tuple[dict[str, np.ndarray], dict]:
    """The movement of each parameter in one step, and the metrics."""
    config = configs.load(f"configs/dinov2.py:small,{family}", texts)
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        run, state, batch = compiled_models.first_step(config, mesh)
        before = jax.device_get(state.trainable)
        state, metrics = run.step(state, batch)
        after, metrics = jax.device_get((state.trainable, metrics))
    return {name: after[name] - before[name] for name in after}, metrics


def distance(movement: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """The difference relative to the reference, both as lengths; untrained parameters do not move."""
    names = movement.keys() | reference.keys()
    squares = (np.square(movement.get(name, 0.0) - reference.get(name, 0.0)).sum() for name in names)
    return math.sqrt(sum(squares) / sum(np.square(step).sum() for step in reference.values()))
