"""Names of other libraries: those of timm build our models, and other spellings get the nearest name."""

import pytest

from equivit.models import zoo


@pytest.mark.parametrize(
    "name, ours, fields",
    [
        ("vit_tiny_patch16_224", "vit_ti16", dict(image_size=(224, 224))),
        ("vit_tiny_patch16_224.augreg_in21k", "vit_ti16", dict(image_size=(224, 224))),
        ("deit3_small_patch16_384.fb_in1k", "vit_s16", dict(image_size=(384, 384))),
        ("vit_huge_patch14_224", "vit_h14", dict(image_size=(224, 224))),
        ("vit_base_patch14_reg4_dinov2.lvd142m", "dinov2_vit_b14_reg", {}),
        ("dinov2_vits14", "dinov2_vit_s14", {}),
        ("vit_small_plus_patch16_dinov3.lvd1689m", "dinov3_vit_s16plus", {}),
        ("vit_7b_patch16_dinov3.lvd1689m", "dinov3_vit_7b16", {}),
        ("dinov3_vitl16", "dinov3_vit_l16", {}),
        ("vit_base_patch16_clip_quickgelu_224.openai", "clip_vit_b16", dict(image_size=(224, 224))),
        ("swin_base_patch4_window12_384", "swin_b", dict(image_size=(384, 384), window_size=(12, 12))),
        ("swinv2_tiny_window8_256", "swinv2_t", dict(image_size=(256, 256), window_size=(8, 8))),
        ("mvitv2_tiny.fb_in1k", "mvitv2_t", {}),
        ("cvt_13", "cvt_13", {}),
    ],
)
def test_a_name_of_timm_is_one_of_ours(name, ours, fields):
    assert zoo.configuration(name) == zoo.configuration(ours, **fields)
    assert zoo.types_of(name) == zoo.types_of(ours)


def test_overrides_precede_the_name():
    assert zoo.configuration("vit_tiny_patch16_224", image_size=(32, 64)).image_size == (32, 64)


@pytest.mark.parametrize(
    "spelling, ours",
    [
        ("ViT-S/16", "vit_s16"),
        ("vit_small", "vit_s16"),
        ("vit-tiny", "vit_ti16"),
        ("vit_tny_patch16_224", "vit_ti16"),
        ("octic_vit_base", "octic_vit_b16"),
        ("swin_tiny", "swin_t"),
        ("cvt13", "cvt_13"),
        ("DINOv2_ViT-L/14", "dinov2_vit_l14"),
    ],
)
def test_the_nearest_of_another_spelling(spelling, ours):
    with pytest.raises(ValueError, match=f"is not known; did you mean {ours}\\b"):
        zoo.configuration(spelling)


@pytest.mark.parametrize("name", ["vit_giant_patch14_224", "vit_tiny_patch99_224", None, 3, "resnet50"])
def test_a_name_of_no_model_here(name):
    """Also one that is well formed, of a size that the zoo does not have."""
    with pytest.raises(ValueError, match="is not known; "):
        zoo.configuration(name)
