"""equivit's kernels: one operation per file, each with its reference in plain jnp; `dispatch.py` chooses one."""

from kernels.dispatch import using

__all__ = ["using"]
