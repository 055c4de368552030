"""equivit's kernels: operations on octic fields, each with its reference in plain jnp, which defines what is right.

`d8_gelu.py`, `octic_linear_gelu.py` and `octic_mlp.py` hold reference and TPU kernel (Pallas, Mosaic), the files
`*_gpu.py` those for Hopper GPUs (Mosaic GPU).  `attention.py` is softmax attention, of dense layers too, and
`isotypic_attention.py` that of a field with its linear maps; both have kernels for a TPU (`attention_tpu.py`).
`implementation=` chooses, "auto" when a program is lowered (`dispatch.py`).
"""

from kernels.dispatch import using

__all__ = ["using"]
