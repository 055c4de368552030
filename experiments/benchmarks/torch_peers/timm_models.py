"""timm's models under `torch.compile`: the peer that `conv_models_cpu.py` times, run by a Python of its own.

    python -m venv torch-venv
    torch-venv/bin/pip install torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cpu
    torch-venv/bin/pip install timm==1.0.31

It imports nothing of equivit.  A question for a model (`serve.py`) is {"model": name, "shape": [B, H, W, C], ...}.
"""

import timm
import torch
from serve import Made, serve


def made(question: dict) -> Made:
    """A random model and random images."""
    batch, height, width, channels = question["shape"]
    torch.manual_seed(0)
    return Made(timm.create_model(question["model"]), torch.randn(batch, channels, height, width))


if __name__ == "__main__":
    serve(made)
