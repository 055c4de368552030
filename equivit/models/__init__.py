"""Models, one architecture per file.

`create` builds a named model, `remade` rebuilds a model with another configuration, and `fitted` returns only the
tensors for that.
"""

from equivit.models.remade import fitted, remade
from equivit.models.zoo import create, names

__all__ = ["create", "fitted", "names", "remade"]
