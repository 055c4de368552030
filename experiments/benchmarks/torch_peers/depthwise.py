"""The depthwise module in plain torch: the peer that `depthwise_module.py` times."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def make(
    tensors: dict[str, np.ndarray], x: np.ndarray, grid: tuple[int, int], what: str, threads: int
) -> tuple[np.ndarray, Callable[[], Any]]:
    """The module's result for x [B, h w, D], and the call that runs it.

    `what` is "forward"; "maps", its two linear maps alone; or "gradients", of the sum of the result by all parameters
    and x too.  `tensors` have logical names; matrices are [in, out], taps [k, k, D].
    """
    torch.set_num_threads(threads)
    p = {name: torch.tensor(array.T if array.ndim == 2 else array) for name, array in tensors.items()}
    p["taps"] = p["taps"].permute(2, 0, 1)[:, None].contiguous()
    leaves = [tensor.requires_grad_(what == "gradients") for tensor in (*p.values(), torch.tensor(x))]
    module = functools.partial(_module, p, leaves[-1], None if what == "maps" else grid)

    @torch.inference_mode(what != "gradients")
    def run() -> Any:
        return torch.autograd.grad(module().sum(), leaves) if what == "gradients" else module()

    return module().detach().numpy(), run


def _module(p: dict[str, torch.Tensor], x: torch.Tensor, grid: tuple[int, int] | None) -> torch.Tensor:
    """x [B, h w, D] -> the same; channels last, which tokens are.  Without a grid nothing is convolved."""
    v = F.linear(x, p["value.weight"], p["value.bias"])
    if grid:
        maps = v.reshape(len(x), *grid, -1).permute(0, 3, 1, 2)  # a view whose memory is channels last
        y = F.conv2d(maps, p["taps"], padding=p["taps"].shape[-1] // 2, groups=maps.shape[1])
        v = y.permute(0, 2, 3, 1).reshape(x.shape)
    return F.linear(v, p["proj.weight"], p["proj.bias"])
