"""BiXT in plain torch under `torch.compile`: the peer that `conv_models_cpu.py` times, as `timm_models.py` is.

Its tensors have the names of the official files, in which equivit writes its own weights.  Both directions of the
cross-attention need the same scores, which `scaled_dot_product_attention` does not give: it serves where attention goes
one way.  Source: BiXT (arXiv 2402.12138).

It imports nothing of equivit.  A question for a model (`serve.py`), {"file": path, "heads": number, ...}, has the .npz
file with its tensors, with images [B, H, W, C], and with the logits that it must find.
"""

import numpy as np
import torch
import torch.nn.functional as F
from serve import Made, serve

OTHERS = ("images", "logits")  # of the arrays in a file
POSITION = "fourier_pos_encode.pos"  # no parameter


def made(question: dict) -> Made:
    """The model, the images and the logits of a file."""
    with np.load(question["file"]) as file:
        arrays = {name: torch.tensor(file[name]) for name in file.files}
    images, logits = (arrays.pop(name) for name in OTHERS)
    return Made(BiXT(arrays, question["heads"]), images.permute(0, 3, 1, 2).contiguous(), logits)


class BiXT(torch.nn.Module):
    """Images [B, C, H, W] -> logits [B, classes]; the tensors of a file by their names, with "/" for "."."""

    def __init__(self, tensors: dict[str, torch.Tensor], heads: int):
        super().__init__()
        self.heads = heads
        self.depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        for name, tensor in tensors.items():
            if name == POSITION:
                self.register_buffer(name.replace(".", "/"), tensor)
            else:
                self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))

    def forward(self, images):
        tokens = self.conv("patch_embed.proj", images)
        tokens = tokens + self.conv("fourier_pos_encode.token_projection", self.tensor(POSITION)[None])
        tokens = tokens.flatten(2).transpose(1, 2)
        latents = self.latents.expand(len(tokens), -1, -1)
        for i in range(self.depth):
            cross, own = f"blocks.{i}.cross_attention_latents_token", f"blocks.{i}.self_attention_latents"
            latents, tokens = self.cross_block(cross, latents, tokens, both=i < self.depth - 1)
            latents = self.self_block(own, latents)
        return self.linear("head", self.norm("fc_norm", latents.mean(1)))

    def cross_block(self, name: str, latents, tokens, *, both: bool):
        """Latents [B, L, D] and tokens [B, N, D] -> the same; cross-attention of both, or of the latents alone."""
        attend = self.both_ways if both else self.one_way
        normed = self.norm(f"{name}.norm1_lat", latents), self.norm(f"{name}.norm1_pat", tokens)
        to_latents, to_tokens = attend(f"{name}.attn", *normed)
        latents = latents + to_latents
        latents = latents + self.mlp(f"{name}.mlp_lat", self.norm(f"{name}.norm2_lat", latents))
        if both:
            tokens = tokens + to_tokens
            tokens = tokens + self.mlp(f"{name}.mlp_pat", self.norm(f"{name}.norm2_pat", tokens))
        return latents, tokens

    def both_ways(self, name: str, latents, tokens):
        """Two softmaxes of one matrix of scores."""
        r, v = self.in_heads(f"{name}.rv_latents", latents, 2)
        r_tokens, v_tokens = self.in_heads(f"{name}.rv_patches", tokens, 2)
        scores = (r * r.shape[-1] ** -0.5) @ r_tokens.transpose(-1, -2)
        to_latents, to_tokens = scores.softmax(-1) @ v_tokens, scores.softmax(-2).transpose(-1, -2) @ v
        return self.joined(f"{name}.proj_lat", to_latents), self.joined(f"{name}.proj_pat", to_tokens)

    def one_way(self, name: str, latents, tokens):
        """Attention from the latents to the tokens."""
        (r,) = self.in_heads(f"{name}.r_latents", latents, 1)
        y = F.scaled_dot_product_attention(r, *self.in_heads(f"{name}.rv_patches", tokens, 2))
        return self.joined(f"{name}.proj_lat", y), None

    def self_block(self, name: str, x):
        """A block of a ViT."""
        qkv = self.in_heads(f"{name}.attn.qkv", self.norm(f"{name}.norm1", x), 3)
        x = x + self.joined(f"{name}.attn.proj", F.scaled_dot_product_attention(*qkv))
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", x))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor by its name in a file."""
        return getattr(self, name.replace(".", "/"))

    def conv(self, name: str, x):
        """Convolution with a stride of the size of its kernel."""
        weight = self.tensor(f"{name}.weight")
        return F.conv2d(x, weight, self.tensor(f"{name}.bias"), stride=weight.shape[2:])

    def linear(self, name: str, x):
        """Linear map of the last axis."""
        return F.linear(x, self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"))

    def norm(self, name: str, x):
        """Layer norm."""
        return F.layer_norm(x, x.shape[-1:], self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), 1e-6)

    def mlp(self, name: str, x):
        """Linear, GELU, linear."""
        return self.linear(f"{name}.fc2", F.gelu(self.linear(f"{name}.fc1", x)))

    def in_heads(self, name: str, x, parts: int) -> torch.Tensor:
        """Linear map [B, N, D] -> [B, N, parts D] -> [parts, B, heads, N, D / heads]."""
        y = self.linear(name, x)
        return y.reshape(*x.shape[:2], parts, self.heads, -1).permute(2, 0, 3, 1, 4)

    def joined(self, name: str, x) -> torch.Tensor:
        """Heads [B, heads, N, d] -> [B, N, heads d], and a linear map."""
        return self.linear(name, x.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    serve(made)
