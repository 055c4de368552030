"""Models: one architecture per file; `create` builds a named one, `remade` gives one another configuration, and
`fitted` its tensors alone."""

from equivit.models.remade import fitted, remade
from equivit.models.zoo import create, names

__all__ = ["create", "fitted", "names", "remade"]
