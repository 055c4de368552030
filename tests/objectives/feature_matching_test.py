"""Feature matching: what it cannot compare is refused before a run compiles anything."""

import contextlib

import pytest

from equivit.models import zoo
from equivit.objectives.feature_matching import FeatureMatching
from equivit.training.config import get_base, validate

SMALL = dict(
    name="vit_ti16", width=24, num_heads=2, depth=2, patch_size=4, image_size=(8, 12), in_channels=3, num_classes=None
)


def options(model=SMALL):
    config = get_base("feature_matching")
    config.steps, config.batch_size, config.objective.teacher = 4, 8, "zoo:vit_ti16"
    config.model = model
    config.data.update(source="synthetic", image_size=(8, 12))
    validate(config)
    return config


def check(**teacher):
    goal = FeatureMatching(options())
    teachers = {"teacher": zoo.abstract(**{**SMALL, "num_classes": 5, **teacher})}
    goal.check_model(zoo.configuration(**SMALL), teachers)


def test_a_teacher_with_the_same_tokens_is_taken():
    check(mlp_dim=16, adaptive=("position",))


@pytest.mark.parametrize(
    "teacher, message",
    [
        (dict(width=16), "zoo:vit_ti16: width=16, not 24"),
        (dict(registers=2), "zoo:vit_ti16: prefix=3, not 1"),
        (dict(adaptive=("token",)), r"zoo:vit_ti16: adaptive=\('token',\): .*; name a teacher with adaptive=False"),
        (dict(in_channels=1), "images for config.objective.teacher=zoo:vit_ti16: they have 3 channels .* takes 1"),
    ],
)
def test_a_teacher_with_other_tokens_or_images_is_refused(teacher, message):
    with pytest.raises(ValueError, match=message):
        check(**teacher)


@pytest.mark.parametrize(("batch", "parts", "least"), [(1, 1, 2), (4, 4, 8), (4, 2, None), (2, 1, None)])
def test_a_micro_batch_of_one_image_is_refused(batch, parts, least):
    """Its tokens equal their mean, by whose distance the loss divides."""
    config = options()
    config.batch_size, config.optimizer.accumulation = batch, parts
    keys = f"config.batch_size={batch} with config.optimizer.accumulation={parts}: .*set batch_size to at least {least}"
    with pytest.raises(ValueError, match=keys) if least else contextlib.nullcontext():
        FeatureMatching(config).check_model(zoo.configuration(**SMALL), {"teacher": zoo.abstract(**SMALL)})


@pytest.mark.parametrize(
    "model, message",
    [
        (
            dict(name="swin_t", num_classes=None),
            "config.model.name='swin_t': .*'feature_matching' .*compares.*; use one",
        ),
        (SMALL | dict(adaptive=True), "config.model.adaptive=True: the content determines its patch grid"),
        (
            SMALL | dict(adaptive=("token",)),
            "config.model.adaptive=.*'feature_matching' compares patches on a fixed grid",
        ),
        (
            SMALL | dict(num_classes=5),
            "config.model.num_classes=5: objective.name='feature_matching' has no head to train",
        ),
    ],
)
def test_a_model_without_fixed_patches_or_with_a_head_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        options(model)
