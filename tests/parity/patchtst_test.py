"""Public PatchTST's encoder and classification head in evaluation mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.models import zoo
from tests.parity.arrays import Comparison, files, load, state

WIDTH, HEADS = 32, 4
NORMS = {"norm_attn.1": "norm1", "norm_ffn.1": "norm2"}
NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}
LINEAR = {"self_attn.to_out.0": "attention.proj", "ff.0": "mlp.fc1", "ff.3": "mlp.fc2"}


def weights(theirs) -> dict[str, np.ndarray]:
    """The official arrays under our names; linear maps are transposed, queries, keys and values side by side."""
    ours = {"position": theirs["backbone.W_pos"]}
    linear = {"backbone.W_P": "embed", "head.linear": "head"}
    for layer in sorted({key.split(".")[3] for key in theirs if key.startswith("backbone.encoder.layers.")}):
        old, new = f"backbone.encoder.layers.{layer}.", f"blocks.{layer}."
        linear |= {old + a: new + b for a, b in LINEAR.items()}
        for a, b in NORMS.items():
            ours |= {f"{new}{b}.{mine}": theirs[f"{old}{a}.{name}"] for name, mine in NORM.items()}
        # Their file has the scale of the products, which a random number replaced; ours is 1/sqrt(head channels).
        factor = np.float32(theirs[f"{old}self_attn.sdp_attn.scale"] * (WIDTH // HEADS) ** 0.5)
        for kind in ("weight", "bias"):
            q, k, v = (theirs[f"{old}self_attn.W_{part}.{kind}"].T for part in "QKV")
            ours[f"{new}attention.qkv.{kind}"] = np.concatenate([factor * q, k, v], axis=-1)
    for a, b in linear.items():
        ours |= {f"{b}.weight": theirs[f"{a}.weight"].T, f"{b}.bias": theirs[f"{a}.bias"]}
    return ours


@pytest.mark.parametrize("path", files("jumbo", "patchtst_*.npz"), ids=lambda path: path.stem)
def test_patchtst(path, record_property):
    data = load(path)
    patches = jnp.asarray(np.swapaxes(data["input/patches"], 1, 2))  # theirs are [B, patches, channels, patch_length]
    _, channels, number, length = patches.shape
    config = zoo.configuration(
        "patchtst_public",
        length=length * (number + 1) // 2,
        channels=channels,
        num_classes=data["output/logits"].shape[-1],
        patches=number,
        width=WIDTH,
        num_heads=HEADS,
        mlp_dim=64,
    )
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    model = logical.from_logical(model, weights(state(data)), nnx.Variable)
    c = Comparison(data)
    c.array("output/logits", jax.jit(model.classify)(patches))
    tokens, _ = jax.jit(lambda patches: model.tokens(patches))(patches)
    # The random weights make products in the hundreds, which the softmax magnifies: in float64 ours are 9.3e-6 from
    # the stored ones, which is their own rounding, and in float32 ours add as much.
    c.array("output/tokens", jnp.swapaxes(tokens, -1, -2), tolerance=3e-5)
    c.finish(record_property, "patchtst")
