"""Models: one architecture per file; `create` builds a named one, `abstract` one with shapes in place of
arrays, `remade` gives one another configuration, and `fitted` its tensors alone."""

from equivit.models.remade import fitted, remade
from equivit.models.zoo import abstract, create, names

__all__ = ["abstract", "create", "fitted", "names", "remade"]
