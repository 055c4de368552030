"""Programs compiled for GPUs that are not present: memory, kernels, collectives, and a floor of their time.

target = targets.parse("h200x8")
mesh = sharding.create_mesh(config.mesh, targets.devices(target))
with jax.set_mesh(mesh), targets.lowering_for(target):
    compiled = targets.compiled(lowered(mesh))
targets.estimate(compiled, target, steps)
"""

from equivit.targets.accounting import Account, account
from equivit.targets.cards import CARDS, Card, Target, parse
from equivit.targets.compiling import compiled, devices, lowering_for
from equivit.targets.estimates import MEASURED, estimate, memory
from equivit.targets.reports import report

__all__ = [
    "CARDS",
    "MEASURED",
    "Account",
    "Card",
    "Target",
    "account",
    "compiled",
    "devices",
    "estimate",
    "lowering_for",
    "memory",
    "parse",
    "report",
]
