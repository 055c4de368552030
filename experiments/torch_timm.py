"""timm's models under `torch.compile`: the peer that `conv_models_cpu.py` times, run by a Python of its own.

    python -m venv torch-venv
    torch-venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    torch-venv/bin/pip install timm==1.0.31

It imports nothing of equivit.  Each line that it reads is a question in JSON, and each that it prints and that begins
with a brace an answer; libraries print others.

    {"model": name, "layout": layout, "shape": [B, H, W, C], "threads": n} -> {"parameters": number}
    {"run": layout} -> {"seconds": of the second of two calls}
"""

import json
import sys
import time

import timm
import torch

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def main() -> None:
    calls = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "run" in question:
            answer = dict(seconds=timed(*calls[question["run"]]))
        else:
            torch.set_num_threads(question["threads"])
            model, x = made(question["model"], question["layout"], question["shape"])
            answer = dict(parameters=sum(p.numel() for p in model.parameters()))
            calls[question["layout"]] = torch.compile(model), x
            timed(*calls[question["layout"]])  # compiles
        print(json.dumps(answer), flush=True)


def made(name: str, layout: str, shape: list[int]) -> tuple[torch.nn.Module, torch.Tensor]:
    """A random model for evaluation and random images, with their maps in a layout."""
    batch, height, width, channels = shape
    torch.manual_seed(0)
    images = torch.randn(batch, channels, height, width)
    model = timm.create_model(name).eval()
    return model.to(memory_format=FORMATS[layout]), images.to(memory_format=FORMATS[layout])


@torch.inference_mode()
def timed(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of the second of two calls; the first one wakes threads and fills caches."""
    model(x)
    start = time.perf_counter()
    model(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
