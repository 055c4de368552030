"""Models: one architecture per file; `create` builds a named one."""

from equivit.models.zoo import create, names

__all__ = ["create", "names"]
