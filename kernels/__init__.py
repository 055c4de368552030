"""equivit's kernels: operations on octic fields, each with its reference in plain jnp, which defines what is right.

`d8_gelu.py` and `octic_linear_gelu.py` hold reference and TPU kernel (Pallas, Mosaic), the files `*_gpu.py` those for
Hopper GPUs (Mosaic GPU); `fourier.py` is the transform in their references.  `attention.py` is softmax attention, of
dense layers too, and `isotypic_attention.py` that of a field with its linear maps (`isotypic_linear.py`); both have
kernels for a TPU (`attention_tpu.py`).
`octic_attention.py` and `octic_mlp.py` are the two branches of an octic block, with norm, layer scale and sum
(`octic_branch.py`); `norm.py` is that norm.
`implementation=` chooses, "auto" when a program is lowered (`dispatch.py`).
"""

from kernels.dispatch import using

__all__ = ["using"]
