"""Models, one architecture per file.

`create` builds a named model, `abstract` one with shapes in place of arrays, `remade` rebuilds a model with another
configuration, and `fitted` returns only the tensors for that.
"""

from equivit.models.remade import fitted, remade
from equivit.models.zoo import abstract, create, names

__all__ = ["abstract", "create", "fitted", "names", "remade"]
