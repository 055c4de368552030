"""Operations with platform-specific implementations, one folder each.

`reference.py` is the equation in plain jnp and defines what is right.  `gpu.py` has kernels for Hopper GPUs (Pallas,
Mosaic GPU), calls cuDNN, or has a jnp form for XLA:GPU; `tpu.py` has kernels for TPUs (Pallas, Mosaic) or a jnp form
for XLA:TPU, and `cpu.py` has a jnp form for XLA:CPU.
The operation itself, in `__init__.py`, checks its arguments and chooses the implementation.  `implementation="auto"`
chooses when a program is lowered, among kernels that have run on such a chip.  `using` changes what "auto" means
(`dispatch.py`).

`tpu/` holds code shared by the TPU kernels, and `hopper/` the kernels that make up octic branches on a GPU;
`pointwise.py` has the octic GELU's arithmetic for kernels of any backend.
"""

if __name__ != "equivit.kernels":  # its modules would be loaded a second time
    raise ImportError("import equivit.kernels, not kernels; for another project's kernels leave the root of the clone.")

from equivit.kernels.dispatch import using

__all__ = ["using"]
