"""The dense and the octic block in plain torch: the peer that `block_cpu.py` times.

Features of the octic block are five tensors, A1, A2, B1, B2 [B, N, C] and E [B, N, 2, 2C]; tensors of parameters have
the logical names of equivit (`logical.py`).  Source: octic ViTs, Section 3.2.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F

from equivit.kernels.pointwise import to_isotypic, to_regular

LINES = ("A1", "A2", "B1", "B2")
IRREPS = (*LINES, "E")


def make(
    kind: str, parameters: Mapping[str, np.ndarray], heads: int, x: np.ndarray, dtype: str
) -> tuple[np.ndarray, Callable[[], object]]:
    """A compiled block's result for x [B, N, D], a dense array, and the call that runs it.

    `kind` is "dense", or "octic", whose x has the eight components side by side.  `parameters` have logical names;
    matrices are [in, out].
    """
    cast = getattr(torch, dtype)
    tensors = {name: torch.tensor(array).to(cast) for name, array in parameters.items()}
    # Stored as a linear layer of torch stores its matrix, [out, in].
    tensors = {name: t.T.contiguous().T if t.ndim == 2 else t for name, t in tensors.items()}
    block, x = {"dense": dense_block, "octic": octic_block}[kind], torch.tensor(x).to(cast)
    x = split(x) if kind == "octic" else x
    run = torch.inference_mode()(functools.partial(torch.compile(functools.partial(block, tensors, heads)), x))
    y = run()
    return (join(y) if kind == "octic" else y).float().numpy(), run


def dense_block(p: dict, heads: int, x: torch.Tensor) -> torch.Tensor:
    """x [B, N, D] -> the same."""
    x = x + p["scale1.scale"] * _dense_attention(p, heads, _dense_norm(p, "norm1", x))
    hidden = F.gelu(_dense_linear(p, "mlp.fc1", _dense_norm(p, "norm2", x)))
    return x + p["scale2.scale"] * _dense_linear(p, "mlp.fc2", hidden)


def octic_block(p: dict, heads: int, x: tuple) -> tuple:
    """(A1, A2, B1, B2, E) -> the same."""
    x = _add(x, _scaled(p, "scale1", _octic_attention(p, heads, _octic_norm(p, "norm1", x))))
    hidden = to_regular(_components(_octic_linear(p, "mlp.fc1", _octic_norm(p, "norm2", x))))
    hidden = _field(to_isotypic([F.gelu(v) for v in hidden]))
    return _add(x, _scaled(p, "scale2", _octic_linear(p, "mlp.fc2", hidden)))


def split(x: torch.Tensor) -> tuple:
    """[B, N, D], the components A1, A2, B1, B2, E11, E12, E21, E22 side by side, to the five tensors."""
    return tuple(t.contiguous() for t in _field(x.chunk(8, dim=-1)))


def join(x: tuple) -> torch.Tensor:
    """The inverse of `split`."""
    return torch.cat(_components(x), dim=-1)


def _field(components):
    a1, a2, b1, b2, e11, e12, e21, e22 = components
    return a1, a2, b1, b2, torch.stack([torch.cat([e11, e21], -1), torch.cat([e12, e22], -1)], dim=-2)


def _components(x):
    first, second = x[4].chunk(2, dim=-1)
    return (*x[:4], first[..., 0, :], first[..., 1, :], second[..., 0, :], second[..., 1, :])


def _dense_linear(p, name, x):
    return F.linear(x, p[f"{name}.weight"].T, p[f"{name}.bias"])


def _dense_norm(p, name, x):
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.scale"], p[f"{name}.bias"], 1e-6)


def _dense_attention(p, heads, x):
    batch, tokens, width = x.shape
    q, k, v = _dense_linear(p, "attention.qkv", x).reshape(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v)
    return _dense_linear(p, "attention.proj", y.transpose(1, 2).reshape(batch, tokens, width))


def _octic_linear(p, name, x):
    return tuple(
        F.linear(part, p[f"{name}.{irrep}"].T, p[f"{name}.bias"] if irrep == "A1" else None)
        for irrep, part in zip(IRREPS, x, strict=True)
    )


def _octic_norm(p, name, x):
    variance = sum(part.var(-1, correction=0, keepdim=True) for part in x[:4])
    variance = variance + 0.5 * x[4].var(-1, correction=0, keepdim=True).sum(-2)
    inverse = torch.rsqrt((variance + 1e-5) / 8)
    one = [(part - part.mean(-1, keepdim=True)) * inverse * p[f"{name}.{i}"] for i, part in zip(LINES, x, strict=False)]
    two = (x[4] - x[4].mean(-1, keepdim=True)) * inverse[..., None, :] * p[f"{name}.E"]
    return one[0] + p[f"{name}.bias"], *one[1:], two


def _octic_attention(p, heads, x):
    batch, tokens, _ = x[0].shape
    one, two = (y := _octic_linear(p, "attention.qkv", x))[:4], y[4]
    parts = [part.reshape(batch, tokens, 3, heads, -1) for part in (*one, two[..., 0, :], two[..., 1, :])]
    q, k, v = torch.cat(parts, dim=-1).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    c = out.shape[-1] // 8
    *lines, row0, row1 = out.split([c, c, c, c, 2 * c, 2 * c], dim=-1)
    field = [part.reshape(batch, tokens, -1) for part in lines]
    e = torch.stack([row.reshape(batch, tokens, -1) for row in (row0, row1)], dim=-2)
    return _octic_linear(p, "attention.proj", (*field, e))


def _scaled(p, name, x):
    return tuple(part * p[f"{name}.{irrep}"] for irrep, part in zip(IRREPS, x, strict=True))


def _add(x, y):
    return tuple(a + b for a, b in zip(x, y, strict=True))
