"""Stacks of blocks in torch on a GPU: the peer that `gpu.py` times, run by a Python of its own.

It imports nothing of equivit.  Its argument is a question in JSON, and its last line the answer: milliseconds of a
block, in bfloat16 by autocast, under `torch.compile`.  Blocks have layer scale:

    {"kind": "plain", "timm" or "official", "task": "forward" or "gradient", "width": ..., "heads": ..., "tokens": ...,
     "batch": ..., "depth": ..., "size": ..., "runs": ..., "warmup": ..., "official": directory or null}
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

SCALE = 1e-4  # of layers, at the start
# The models of the official code whose first half are octic blocks.
OFFICIAL = {"ViT-H/14": "d8_inv_early_deit_huge_patch14", "ViT-L/16": "d8_inv_early_deit_large_patch16"}


class Block(torch.nn.Module):
    """A pre-norm block with layer scale."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width, eps=1e-6), torch.nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.fc1, self.fc2 = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.scale1, self.scale2 = (torch.nn.Parameter(torch.full((width,), SCALE)) for _ in range(2))

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.scale1 * self.proj(attended)
        return x + self.scale2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


def stack(question: dict) -> torch.nn.Module:
    """Blocks of a kind, one after the other."""
    width, heads, depth = question["width"], question["heads"], question["depth"]
    if question["kind"] == "plain":
        return torch.nn.Sequential(*(Block(width, heads) for _ in range(depth)))
    import timm

    if question["kind"] == "timm":
        from timm.models.vision_transformer import Block as Theirs

        return torch.nn.Sequential(*(Theirs(width, heads, qkv_bias=True, init_values=SCALE) for _ in range(depth)))
    sys.path.insert(0, question["official"])
    import octic_vits  # noqa: F401  registers its models

    model = timm.create_model(OFFICIAL[question["size"]])
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) >= depth]
    return torch.nn.Sequential(*lists[0][:depth])


def inputs(question: dict, device: str):
    """Tokens [B, N, D], or the five arrays of an octic field."""
    batch, tokens, width = question["batch"], question["tokens"], question["width"]
    if question["kind"] != "official":
        return torch.randn(batch, tokens, width, device=device, requires_grad=True)
    shapes = [(batch, tokens, width // 8)] * 4 + [(batch, tokens, 2, width // 4)]
    return tuple(torch.randn(*shape, device=device, requires_grad=True) for shape in shapes)


def answer(question: dict) -> dict:
    """The answer to a question."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model, x = torch.compile(stack(question).to(device)), inputs(question, device)

    def call():
        with torch.autocast(device, torch.bfloat16):
            if question["task"] == "forward":
                with torch.inference_mode():
                    return model(x)
            y = model(x)
            sum(a.float().square().mean() for a in (y if isinstance(y, tuple) else (y,))).backward()

    times, arrays = [], x if isinstance(x, tuple) else (x,)
    for _ in range(question["warmup"] + question["runs"]):
        for array in (*model.parameters(), *arrays):
            array.grad = None  # backward would read and add to it
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    milliseconds = 1e3 * statistics.median(times[question["warmup"] :]) / question["depth"]
    return dict(milliseconds=milliseconds, torch=torch.__version__)


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))))
