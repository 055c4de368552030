"""Types that say which values are allowed: what they refuse, in which words, and that every field has one."""

import dataclasses
import functools
import math
from typing import Any, Literal

import numpy as np
import pytest

from equivit import constraints, errors
from equivit.constraints import Below1, Inside, NonNegativeFloat, PositiveFloat, PositiveInt, Seed, Share, Size
from equivit.evaluation.adaptation import Sar
from equivit.evaluation.consistency import Shifts
from equivit.evaluation.label_maps import Views
from equivit.models import zoo
from equivit.models.decoders import MaskedAutoencoderConfig
from equivit.models.segmenter.model import SegmenterConfig
from equivit.objectives.registry import OBJECTIVES
from equivit.training import config as configs
from equivit.training import sweep_config

HUGE = 10**400  # more than a float holds
BAD = (math.nan, math.inf, -math.inf, HUGE, -HUGE, "four", True, b"x", 1j, (), (1, "a"), {}, [[]], 1e39)
DOUBTFUL = (None, 0, -1, 2.5, 2**31, 2**32, 1e-50, 1 - 1e-12)


@pytest.mark.parametrize(
    ("value", "type_", "message"),
    [
        (True, PositiveInt, "x=True must be a positive whole number; True is not a number."),
        (0, PositiveInt, "x=0 must be a positive whole number; the nearest is 1."),
        (2.5, PositiveInt, "x=2.5 must be a positive whole number; the nearest is 2."),
        ("four", PositiveInt | None, "x='four' must be a positive whole number, or None."),
        (2**31, PositiveInt, "x=2147483648 must be a positive whole number; the nearest is 2147483647."),
        (2**32, Seed, r"x=4294967296 must be a whole number in \[0, 4294967295\]; the nearest is 4294967295."),
        ("many", PositiveFloat | None, "x='many' must be a positive number, or None."),
        (-1.0, PositiveFloat, "x=-1.0 must be positive."),
        (math.inf, PositiveFloat, "x=inf must be positive and finite."),
        (1e39, PositiveFloat, "x=1e.39 must be positive and finite; in float32 it is inf."),
        (1e-50, NonNegativeFloat, "x=1e-50 must be zero or more; in float32 it is 0."),
        (2**32, NonNegativeFloat, "x=4294967296 must be zero or more; write 4294967296.0."),
        (1.5, Share, r"x=1.5 must be in \[0, 1\]; the nearest is 1."),
        ("a", Share, r"x='a' must be a number in \[0, 1\]."),
        (1 - 1e-12, Inside, r"x=0.999999999999 must be in \(0, 1\); in float32 it is 1."),
        (2, Below1 | tuple[Below1, Below1], r"x=2 must be in \[0, 1\), or two numbers in \[0, 1\)."),
        (29, Size, r"x=29 must be \(height, width\) in pixels, such as \(29, 29\)."),
        ((16, 0), Size, r"x=\(16, 0\) must be \(height, width\) in pixels, such as \(16, 1\)."),
        (0.5, tuple[Share, ...], r"x=0.5 must be one or more numbers in \[0, 1\], such as \(0.5,\)."),
        ((0.5, "a"), tuple[Share, ...], r"x='a' must be a number in \[0, 1\]."),
        ((), tuple[Share, ...], r"x=\(\) must be one or more numbers in \[0, 1\]."),
        ("H9", Literal["plain", "H8"], "x='H9' is not one of plain, H8; the nearest is 'H8'."),
        (1.0, Literal[1, 2], "x=1.0 is not one of 1, 2"),
        ("H9", tuple[Literal["plain", "H8"], ...], r"x='H9' must be one or more of plain, H8, such as \('H8',\)."),
        (
            "H8",
            tuple[Literal["plain", "H8"], ...] | bool,
            r"x='H8' .* of plain, H8, or True or False, such as \('H8',\).",
        ),
        (True, Literal[1, 2] | None, "x=True is not one of 1, 2, or None."),
        (1, bool, "x=1 must be True or False."),
        (None, str, "x=None must be a string."),
        ((5,), str | tuple[str, ...], r"x=\(5,\) must be a string, or one or more strings."),
        ("a" * 5000, PositiveInt, r"x='a{39}... \(5002 characters\) must be a positive whole number."),
    ],
)
def test_what_is_not_allowed_is_told_as_a_colleague_would(value, type_, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        constraints.check("x", value, type_)


def test_integers_that_python_does_not_write_out_are_told_too():
    with pytest.raises(ValueError, match="x=<an integer of 33220 bits> must be a positive whole number"):
        constraints.check("x", 10**10000, PositiveInt)


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (1, PositiveFloat),
        (0, NonNegativeFloat),
        (2**32 - 1, Seed),
        ([1, 2], Size),
        (None, Size | None),
        ((), tuple[str, ...] | tuple[()]),
        (1 - 1e-7, Below1),
        ("a", str | tuple[str, ...]),
        ([[]], Any),
    ],
)
def test_what_is_allowed(value, type_):
    constraints.check("x", value, type_)


def test_the_numbers_of_numpy_are_numbers():
    config = zoo.configuration("vit_pico16", num_classes=np.int64(7), image_size=[np.int32(32), 48], qkv_bias=np.True_)
    assert config == zoo.configuration("vit_pico16", num_classes=7, image_size=(32, 48))
    assert type(config.num_classes) is type(config.image_size[0]) is int and config.qkv_bias is True


def test_the_nearest_is_another_value():
    assert errors.multiples(18, 4) == "the nearest are 16 and 20"
    assert errors.multiples(32, 64) == "the nearest is 64"
    assert errors.multiples(0, 8) == "the nearest is 8"


def test_of_many_names_some_are_listed():
    with pytest.raises(ValueError, match="known are vit_pico16, .* in all.; equivit.models.names.. lists all") as error:
        zoo.configuration("resnet50")
    assert len(str(error.value)) < 250
    with pytest.raises(ValueError, match="ViTConfig describes all") as error:
        zoo.configuration("vit_ti16", momentum=1)
    assert len(str(error.value)) < 250


VIT = zoo.configuration("vit_pico16", num_classes=None)
EXAMPLES = {
    "vit": VIT,
    "jumbo_vit": zoo.configuration("jumbo_vit_pico16"),
    "masked_autoencoder": MaskedAutoencoderConfig(VIT),
    "patchtst": zoo.configuration("patchtst", length=16, channels=2, num_classes=3),
    "swin": zoo.configuration("swin_t"),
    "mvit": zoo.configuration("mvitv2_t"),
    "cvt": zoo.configuration("cvt_13"),
    "mobilenetv4": zoo.configuration("mobilenetv4_conv_small"),
    "efficientvit": zoo.configuration("efficientvit_b0"),
    "shvit": zoo.configuration("shvit_s1"),
    "bixt": zoo.configuration("bixt_ti_p16"),
    "segmenter": SegmenterConfig(zoo.configuration("swin_t", num_classes=None), 5),
    "sar": Sar(),
    "shifts": Shifts(),
    "views": Views(),
}


@pytest.mark.parametrize("kind", [*zoo.CONFIGS, "sar"])
def test_every_field_of_a_dataclass_refuses_what_is_no_value_of_it(kind):
    """A field that is not checked would raise another error here, or take NaN or True."""
    example, refused = EXAMPLES[kind], set()
    for field in dataclasses.fields(example):
        for i, value in enumerate((*BAD, *DOUBTFUL)):
            try:
                dataclasses.replace(example, **{field.name: value})
            except ValueError:
                refused.add((field.name, i))
    numbers = [field.name for field in dataclasses.fields(example) if errors.is_number(getattr(example, field.name))]
    assert len(numbers) >= 2
    assert refused >= {(name, i) for name in numbers for i in range(len(BAD))}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_field_of_a_dataclass_has_a_type_with_a_rule(kind):
    """A plain int or float would take any number, and Any takes all."""
    for field, type_ in constraints.types_of(type(EXAMPLES[kind])).items():
        assert type_ not in (Any, int, float, tuple, object), field


def keys_of(base):
    """The keys of a configuration without those of the model, which are fields of a dataclass."""
    return {key for key in configs.flat(base) if not key.startswith("model.")}


BASES = {name: functools.partial(configs.get_base, name) for name in OBJECTIVES} | {"sweep": sweep_config.get_base}


@pytest.mark.parametrize("name", BASES)
def test_every_key_of_a_configuration_has_a_type(name):
    """Keys of other sections than the objective's are tried once: every objective has them."""
    base, validate = BASES[name](), configs.validate
    if name == "sweep":
        validate = sweep_config.validate
    else:
        base.steps = 10
    keys = keys_of(base)
    assert len(keys) > 20
    if name not in ("supervised", "sweep"):  # a sweep's keys are checked by a function of its own
        keys -= {key for key in keys_of(BASES["supervised"]()) if not key.startswith("objective.")}
    for key in keys:
        *sections, last = key.split(".")
        for bad in (math.nan, True, {"a": 1}, (1, "a"), [[]]):
            config = base.copy_and_resolve_references()
            here = functools.reduce(lambda section, part: section[part], sections, config)
            if bad is True and isinstance(here[last], bool | float):
                continue  # a ConfigDict makes it 1.0
            with here.ignore_type():
                here[last] = bad
            with pytest.raises(ValueError) as error:
                validate(config)
            assert "\n" not in str(error.value) and last in str(error.value)
