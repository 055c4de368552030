"""How a peer in torch answers `conv_models_cpu.py`, run by a Python that has torch and nothing of equivit.

Each line that it reads is a question in JSON, and each that it prints and that begins with a brace an answer; libraries
print others.

    {"layout": layout, "threads": n, ...: what the peer makes the model of} -> {"parameters": number, "error": error}
    {"run": layout} -> {"seconds": of the second of two calls}

The error is that of the model's results, over their largest entry; null for a peer that is given no results.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Made(NamedTuple):
    """A model for evaluation, images [B, C, H, W], and the results that it must give for them, if they are known."""

    model: torch.nn.Module
    images: torch.Tensor
    expected: torch.Tensor | None = None


def serve(make: Callable[[dict], Made]) -> None:
    """Answer until there is no more question; `make` is given those for a model."""
    calls = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "run" in question:
            answer = dict(seconds=timed(*calls[question["run"]])[0])
        else:
            torch.set_num_threads(question["threads"])
            made, layout = make(question), FORMATS[question["layout"]]
            compiled = torch.compile(made.model.eval().to(memory_format=layout))
            calls[question["layout"]] = call = compiled, made.images.to(memory_format=layout)
            error = _error(timed(*call)[1], made.expected)  # compiles
            answer = dict(parameters=sum(p.numel() for p in made.model.parameters()), error=error)
        print(json.dumps(answer), flush=True)


@torch.inference_mode()
def timed(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds of the second of two calls, and its result; the first one wakes threads and fills caches."""
    model(x)
    start = time.perf_counter()
    y = model(x)
    return time.perf_counter() - start, y


def _error(found: torch.Tensor, expected: torch.Tensor | None) -> float | None:
    return None if expected is None else float((found - expected).abs().max() / expected.abs().max())
