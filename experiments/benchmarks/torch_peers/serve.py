"""A peer in torch answers questions of `processes.Peer`; its Python has torch and nothing of equivit.

Each line of stdin is a question in JSON, and each line of stdout that begins with a brace an answer:

    {"layout": layout, "threads": n, ...: description of the model} -> {"parameters": number, "error": error}
    {"run": layout} -> {"seconds": of the second of two calls}

A question may have a "task", "forward" (the default) or "training", and a "type", "float32" (the default) or
"bfloat16", by autocast.  The error is relative to the largest entry of the expected results, null without any.
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
    """Answer questions until there are no more; `make` gets those for a model."""
    calls = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "run" in question:
            answer = dict(seconds=timed(calls[question["run"]])[0])
        else:
            torch.set_num_threads(question["threads"])
            made, layout = make(question), FORMATS[question["layout"]]
            task = {"forward": forward, "training": training_step}[question.get("task", "forward")]
            calls[question["layout"]] = call = task(made, layout, question.get("type") == "bfloat16")
            found, error = timed(call)[1], None  # compiles
            if made.expected is not None:
                error = float((found - made.expected).abs().max() / made.expected.abs().max())
            answer = dict(parameters=sum(p.numel() for p in made.model.parameters()), error=error)
        print(json.dumps(answer), flush=True)


def forward(made: Made, layout: torch.memory_format, low: bool) -> Callable[[], torch.Tensor]:
    """The call of the compiled model; `low`: with products in bfloat16."""
    model, x = torch.compile(made.model.eval().to(memory_format=layout)), made.images.to(memory_format=layout)

    @torch.inference_mode()
    @torch.autocast("cpu", torch.bfloat16, enabled=low)
    def call():
        return model(x)

    return call


def training_step(made: Made, layout: torch.memory_format, low: bool) -> Callable[[], torch.Tensor]:
    """The call of cross-entropy, gradient and AdamW, which returns the loss."""
    model, x = torch.compile(made.model.train().to(memory_format=layout)), made.images.to(memory_format=layout)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    labels = torch.arange(len(x))

    def call():
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return call


def timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Seconds of the second of two calls, and its result; the first one wakes threads and fills caches."""
    call()
    start = time.perf_counter()
    y = call()
    return time.perf_counter() - start, y
