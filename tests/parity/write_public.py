"""Writes tests/fixtures/public: small random models of transformers and timm, computed in float64.

    python tests/parity/write_public.py      # needs torch, transformers and timm, which tests do not

A file has the model's tensors `param/<name>` as the library saves them, in float32, `config` (its config.json as text),
an image of 32 to 64 pixels a side `input/image` and `output/...`.  The files that are there were written with
torch 2.13.0, transformers 5.24.0 and timm 1.0.31.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import timm
import torch
import transformers

PLACE = pathlib.Path(__file__).parent.parent / "fixtures" / "public"
LABELS = {str(i): name for i, name in enumerate(("cat", "dog", "eel", "fox", "gnu"))}
LABELLED = dict(id2label=LABELS, label2id={name: int(i) for i, name in LABELS.items()})
PLAIN = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=32, patch_size=8
)
DINOV2 = PLAIN | dict(mlp_ratio=2, layerscale_value=0.5, layer_norm_eps=1e-6)
SWIN = dict(image_size=64, patch_size=4, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4, mlp_ratio=2.0)
CVT = dict(
    embed_dim=[8, 16, 24], depth=[1, 2, 3], num_heads=[1, 2, 3], mlp_ratio=[2.0] * 3, patch_stride=[4, 2, 2],
    drop_path_rate=[0.0] * 3,
)  # fmt: skip
TRANSFORMERS = {
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**PLAIN, **LABELLED)),
    "vit_tanh_pooler": lambda: transformers.ViTModel(
        transformers.ViTConfig(**PLAIN | dict(image_size=[16, 32]), hidden_act="gelu_new", layer_norm_eps=0.1)
    ),
    "deit": lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**PLAIN, **LABELLED)),
    "vit_mae": lambda: transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(
            **PLAIN, decoder_hidden_size=8, decoder_num_attention_heads=1, decoder_num_hidden_layers=1,
            decoder_intermediate_size=8, mask_ratio=0.0,
        )
    ),
    "swin": lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN, **LABELLED)),
    "swinv2": lambda: transformers.Swinv2ForImageClassification(transformers.Swinv2Config(**SWIN, **LABELLED)),
    "cvt": lambda: transformers.CvtForImageClassification(transformers.CvtConfig(**CVT, **LABELLED)),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**DINOV2)),
    "dinov2_registers": lambda: transformers.Dinov2WithRegistersForImageClassification(
        transformers.Dinov2WithRegistersConfig(**DINOV2, num_register_tokens=2, use_swiglu_ffn=True, **LABELLED)
    ),
}  # fmt: skip
DINOV3 = PLAIN | dict(num_register_tokens=2, layerscale_value=0.5)
TRANSFORMERS["dinov3"] = lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**DINOV3))
TRANSFORMERS["dinov3_gated"] = lambda: transformers.DINOv3ViTModel(
    transformers.DINOv3ViTConfig(**DINOV3, use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False)
)
TRANSFORMERS["siglip"] = lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**PLAIN))
ViT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=2, num_classes=5)
TIMM = {
    "timm_gap": dict(class_token=False, global_pool="avg"),
    "timm_gap_norm": dict(class_token=False, global_pool="avg", fc_norm=False, reg_tokens=2, no_embed_class=True),
    "timm_fc_norm": dict(global_pool="avg"),
    "timm_qk_norm": dict(qk_norm=True, init_values=0.5),
    "timm_siglip": dict(class_token=False, global_pool="map", act_layer="gelu_tanh"),
}
# Files of JAX codes, which timm reads.
JAX = {"vit_jax": {}, "big_vision": dict(class_token=False, global_pool="map")}


def randomise(model) -> None:
    """Draw every parameter and statistic, so that none hides an error."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "coords" not in name:
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            scale = 1 / tensor.shape[1] ** 0.5 if tensor.ndim == 2 else 0.3
            start = 1.0 if "var" in name or ("norm" in name and name.endswith("weight")) else 0.0
            drawn = drawn.abs() if "var" in name else drawn
            tensor.copy_((start + scale * drawn).float())


def of_transformers(name: str) -> dict[str, np.ndarray]:
    model = TRANSFORMERS[name]().eval()
    randomise(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        config = pathlib.Path(folder, "config.json").read_text()
    size = json.loads(config).get("image_size", 64)
    size = (32, 48) if name.startswith("dinov3") else size  # such a model takes any
    image = picture(*(size if isinstance(size, list | tuple) else (size, size)))
    options = dict(noise=torch.arange(16.0)[None]) if name == "vit_mae" else {}
    model = model.double()
    output = (model.vit if name == "vit_mae" else model)(torch.from_numpy(image), **options)
    key = next(key for key in ("logits", "pooler_output", "last_hidden_state") if output.get(key) is not None)
    key = "last_hidden_state" if name.startswith(("vit_", "dinov")) and key == "pooler_output" else key
    return packed(tensors, config, image, {key: output[key]})


def of_timm(name: str) -> dict[str, np.ndarray]:
    model = timm.models.VisionTransformer(**ViT, **TIMM[name]).eval()
    randomise(model)
    tensors = {key: tensor.numpy().copy() for key, tensor in model.state_dict().items()}
    image = picture(32, 32)
    return packed(tensors, "{}", image, {"logits": model.double()(torch.from_numpy(image))})


def of_jax(name: str) -> dict[str, np.ndarray]:
    """A random file of a JAX code; timm converts it, and computes with the tanh approximation as that code does."""
    model = timm.models.VisionTransformer(**ViT, **JAX[name], act_layer="gelu_tanh").eval()
    tensors = jax_tensors(name == "big_vision")
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/weights.npz", **tensors)
        model.load_pretrained(f"{folder}/weights.npz")
    image = picture(32, 32)
    return packed(tensors, "{}", image, {"logits": model.double()(torch.from_numpy(image))})


def jax_tensors(big_vision: bool) -> dict[str, np.ndarray]:
    width, heads, hidden, rows = ViT["embed_dim"], ViT["num_heads"], 48, 16 + (not big_vision)
    shapes: dict[str, tuple[int, ...]] = {"embedding/kernel": (8, 8, 3, width), "embedding/bias": (width,)}
    shapes |= {"head/kernel": (width, 5), "head/bias": (5,)} | norm("Transformer/encoder_norm")
    attention, second, mlp = (0, 1, 0) if big_vision else (1, 2, 3)
    for at in (f"Transformer/encoderblock_{i}" for i in range(2)):
        shapes |= norm(f"{at}/LayerNorm_0") | norm(f"{at}/LayerNorm_{second}")
        shapes |= mixing(f"{at}/MultiHeadDotProductAttention_{attention}", width, heads)
        shapes |= dense(f"{at}/MlpBlock_{mlp}", width, hidden)
    if big_vision:
        at, shapes["pos_embedding"] = "MAPHead_0", (1, rows, width)
        shapes |= {f"{at}/probe": (1, 1, width)} | norm(f"{at}/LayerNorm_0") | dense(f"{at}/MlpBlock_0", width, hidden)
        shapes |= mixing(f"{at}/MultiHeadDotProductAttention_0", width, heads)
    else:
        shapes |= {"cls": (1, 1, width), "Transformer/posembed_input/pos_embedding": (1, rows, width)}
    random, prefix = np.random.default_rng(0), "params/" if big_vision else ""
    return {prefix + name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def norm(at: str) -> dict[str, tuple[int, ...]]:
    return {f"{at}/{last}": (ViT["embed_dim"],) for last in ("scale", "bias")}


def dense(at: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    sizes = {0: (width, hidden), 1: (hidden, width)}
    kernels = {f"{at}/Dense_{i}/kernel": size for i, size in sizes.items()}
    return kernels | {f"{at}/Dense_{i}/bias": size[1:] for i, size in sizes.items()}


def mixing(at: str, width: int, heads: int) -> dict[str, tuple[int, ...]]:
    size, parts = width // heads, ("query", "key", "value")
    shapes = {f"{at}/{part}/kernel": (width, heads, size) for part in parts}
    shapes |= {f"{at}/{part}/bias": (heads, size) for part in parts}
    return shapes | {f"{at}/out/kernel": (heads, size, width), f"{at}/out/bias": (width,)}


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1, 3, height, width)).astype(np.float32).astype(np.float64)


def packed(tensors, config: str, image, outputs) -> dict[str, np.ndarray]:
    data = {f"param/{name}": np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    data |= {f"output/{name}": tensor.detach().numpy().astype(np.float32) for name, tensor in outputs.items()}
    return data | {"input/image": image.astype(np.float32), "config": np.asarray(config)}


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    with torch.no_grad():
        for name in sys.argv[1:] or (*TRANSFORMERS, *TIMM, *JAX):
            data = (of_timm if name in TIMM else of_jax if name in JAX else of_transformers)(name)
            np.savez_compressed(PLACE / f"{name}.npz", **data)
            print(f"{name}: {(PLACE / f'{name}.npz').stat().st_size:,} bytes", flush=True)
