"""Models: one architecture per file; `create` builds a named one, `remade` gives one another configuration."""

from equivit.models.remade import remade
from equivit.models.zoo import create, names

__all__ = ["create", "names", "remade"]
