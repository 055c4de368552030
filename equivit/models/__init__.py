"""Models, one folder or file per architecture.

`create` builds a named model, `abstract` one with shapes in place of arrays, `remade` rebuilds a model with another
configuration, and `fitted` returns only the tensors for that.  `adapt` makes a model truly shift-equivariant.
"""

from equivit.models.adaptive import adapt
from equivit.models.remade import fitted, remade
from equivit.models.zoo import abstract, create, names

__all__ = ["abstract", "adapt", "create", "fitted", "names", "remade"]
