"""Operations that have a form of their own on some platform; a folder each.

`reference.py` is the equation in plain jnp and defines what is right.  `gpu.py` has kernels for Hopper GPUs (Pallas,
Mosaic GPU) or cuDNN's, `tpu.py` kernels for TPUs (Pallas, Mosaic), and `cpu.py` a form in jnp for XLA:CPU.
The operation itself, in `__init__.py`, checks its arguments and chooses: `implementation="auto"` decides when a program
is lowered and takes only kernels that have run on such a chip.  `using` changes what "auto" means (`dispatch.py`).

`tpu/` holds what the TPU kernels share, `pointwise.py` the arithmetic of the octic GELU for kernels of any backend.
"""

from kernels.dispatch import using

__all__ = ["using"]
