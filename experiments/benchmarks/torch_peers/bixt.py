"""BiXT in plain torch under `torch.compile`: the peer that `conv_models_cpu.py` times, as `timm_models.py` is.

Its tensors have the names of the official files, in which equivit writes its own weights.  Both directions of the
cross-attention need the same scores, which `scaled_dot_product_attention` does not give: it serves where attention goes
one way.  Source: BiXT (arXiv 2402.12138).

It imports nothing of equivit.  A question for a model (`serve.py`) has the .npz file with its tensors, with images
[B, H, W, C], and with the logits that it must find:

    {"file": path, "heads": number, ...}
"""

import numpy as np
import torch
import torch.nn.functional as F
from serve import Made, serve
from torch import nn

EPS = 1e-6
OTHERS = ("images", "logits")  # of the arrays in a file


def made(question: dict) -> Made:
    """The model, the images and the logits of a file."""
    with np.load(question["file"]) as file:
        arrays = {name: torch.tensor(file[name]) for name in file.files}
    images, logits = (arrays.pop(name) for name in OTHERS)
    model = BiXT(arrays, question["heads"])
    model.load_state_dict(arrays)
    return Made(model, images.permute(0, 3, 1, 2).contiguous(), logits)


class BiXT(nn.Module):
    """Images [B, C, H, W] -> logits [B, classes]; sizes follow from the tensors of a file."""

    def __init__(self, tensors: dict[str, torch.Tensor], heads: int):
        super().__init__()
        width, channels, *patch = tensors["patch_embed.proj.weight"].shape
        hidden = len(tensors["blocks.0.self_attention_latents.mlp.fc1.bias"])
        depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        self.latents = nn.Parameter(torch.empty_like(tensors["latents"]))
        self.patch_embed = nn.ModuleDict(dict(proj=nn.Conv2d(channels, width, patch, stride=patch)))
        self.fourier_pos_encode = Position(tensors["fourier_pos_encode.pos"].shape, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, both=i < depth - 1) for i in range(depth))
        self.fc_norm, self.head = nn.LayerNorm(width, eps=EPS), nn.Linear(width, len(tensors["head.bias"]))

    def forward(self, images):
        tokens = self.patch_embed["proj"](images) + self.fourier_pos_encode()
        tokens = tokens.flatten(2).transpose(1, 2)
        latents = self.latents.expand(len(tokens), -1, -1)
        for block in self.blocks:
            latents, tokens = block(latents, tokens)
        return self.head(self.fc_norm(latents.mean(1)))


class Position(nn.Module):
    """The projected code of a grid, [1, width, h, w]."""

    def __init__(self, shape: torch.Size, width: int):
        super().__init__()
        self.register_buffer("pos", torch.empty(shape))
        self.token_projection = nn.Conv2d(shape[0], width, 1)

    def forward(self):
        return self.token_projection(self.pos[None])


class Block(nn.Module):
    """Cross-attention, which goes one way in the last block, then self-attention of the latents."""

    def __init__(self, width: int, hidden: int, heads: int, *, both: bool):
        super().__init__()
        self.cross_attention_latents_token = CrossBlock(width, hidden, heads, both=both)
        self.self_attention_latents = SelfBlock(width, hidden, heads)

    def forward(self, latents, tokens):
        latents, tokens = self.cross_attention_latents_token(latents, tokens)
        return self.self_attention_latents(latents), tokens


class CrossBlock(nn.Module):
    """Latents [B, L, D] and tokens [B, N, D] -> the same."""

    def __init__(self, width: int, hidden: int, heads: int, *, both: bool):
        super().__init__()
        self.norm1_lat, self.norm1_pat = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.norm2_lat, self.mlp_lat = nn.LayerNorm(width, eps=EPS), Mlp(width, hidden)
        self.attn = (BothWays if both else OneWay)(width, heads)
        if both:
            self.norm2_pat, self.mlp_pat = nn.LayerNorm(width, eps=EPS), Mlp(width, hidden)
        self.both = both

    def forward(self, latents, tokens):
        to_latents, to_tokens = self.attn(self.norm1_lat(latents), self.norm1_pat(tokens))
        latents = latents + to_latents
        latents = latents + self.mlp_lat(self.norm2_lat(latents))
        if self.both:
            tokens = tokens + to_tokens
            tokens = tokens + self.mlp_pat(self.norm2_pat(tokens))
        return latents, tokens


class BothWays(nn.Module):
    """Two softmaxes of one matrix of scores."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.rv_latents, self.rv_patches = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.proj_lat, self.proj_pat = nn.Linear(width, width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, latents, tokens):
        r, v = in_heads(self.rv_latents(latents), 2, self.heads)
        r_tokens, v_tokens = in_heads(self.rv_patches(tokens), 2, self.heads)
        scores = (r * r.shape[-1] ** -0.5) @ r_tokens.transpose(-1, -2)
        to_latents, to_tokens = scores.softmax(-1) @ v_tokens, scores.softmax(-2).transpose(-1, -2) @ v
        return self.proj_lat(side_by_side(to_latents)), self.proj_pat(side_by_side(to_tokens))


class OneWay(nn.Module):
    """Attention from the latents to the tokens."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.r_latents, self.rv_patches = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj_lat, self.heads = nn.Linear(width, width), heads

    def forward(self, latents, tokens):
        (r,) = in_heads(self.r_latents(latents), 1, self.heads)
        y = F.scaled_dot_product_attention(r, *in_heads(self.rv_patches(tokens), 2, self.heads))
        return self.proj_lat(side_by_side(y)), None


class SelfBlock(nn.Module):
    """A block of a ViT."""

    def __init__(self, width: int, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.attn, self.mlp = SelfAttention(width, heads), Mlp(width, hidden)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SelfAttention(nn.Module):
    """Self-attention of the latents."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        y = F.scaled_dot_product_attention(*in_heads(self.qkv(x), 3, self.heads))
        return self.proj(side_by_side(y))


class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def in_heads(x: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """[B, N, parts D] -> [parts, B, heads, N, D / heads]."""
    batch, tokens, _ = x.shape
    return x.reshape(batch, tokens, parts, heads, -1).permute(2, 0, 3, 1, 4)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, N, d] -> [B, N, heads d]."""
    return x.transpose(1, 2).flatten(2)


if __name__ == "__main__":
    serve(made)
