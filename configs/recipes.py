"""What the configurations share: reading the words of a mode, the `:quicktest` of a recipe, and the names of models.

This is the only file here that the others import; all else that a run depends on stands in its own configuration.
"""

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from ml_collections import ConfigDict

from equivit import errors

# Families of octic ViTs, and the model of the zoo that has them.
FAMILIES = {"plain": "vit", "H8": "octic_vit", "I8": "octic_vit", "D8": "octic_vit", "H2": "flip_vit", "D2": "flip_vit"}


def words(
    mode: str, *flags: str, values: Mapping[str, Callable[[str], Any]] | None = None, **choices: Iterable[str]
) -> SimpleNamespace:
    """What a mode says: words joined by commas, such as "I8,k=6,quicktest".

        w = words("I8,k=6", "quicktest", family=("H8", "I8"), values=dict(k=int))
        w.family, w.k, w.quicktest  # "I8", 6, False

    Args:
      mode: the words.
      flags: words that are there or not.
      values: for `name=text`, what reads the text, by name.
      choices: words of which a mode holds at most one, by the name of the choice.

    Returns:
      An attribute for each flag (True or False), value and choice (None where the mode says nothing).

    Raises:
      ValueError: an unknown word, a value that cannot be read, or two words that exclude each other.
    """
    values, choice = values or {}, {word: name for name, group in choices.items() for word in group}
    known = [*choice, *flags, *(f"{name}=..." for name in values)]
    result = SimpleNamespace(**dict.fromkeys([*choices, *values]), **dict.fromkeys(flags, False))
    given = {}
    for word in mode.split(","):
        name, equals, text = word.partition("=")
        if equals and name in values:
            value = _read(word, text, values[name])
        else:
            errors.one_of("config mode", word, known)
            name, value = choice.get(word, word), (word if word in choice else True)
        if name in given:
            raise ValueError(f"config mode={mode!r}: {given[name]!r} and {word!r} exclude each other.")
        given[name] = word
        setattr(result, name, value)
    return result


def _read(word: str, value: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(value)
    except ValueError:
        kind = "a whole number" if read is int else "a number"
        raise ValueError(f"config mode={word!r}: {value!r} is not {kind}.") from None


def small(c: ConfigDict, *, batch_size: int = 8, image_size: tuple[int, int] = (32, 32), **model: Any) -> None:
    """Shrink a recipe for `:quicktest`: two steps of a small model on synthetic images, within a minute on a laptop.

    `model` holds fields of the model to change.
    """
    c.epochs, c.steps, c.batch_size, c.precision = None, 2, batch_size, "float32"
    c.model.update(image_size=image_size, **model)
    c.data.update(source="synthetic", eval_split="test", image_size=image_size, workers=0)
    c.data.update(train_examples=2 * batch_size, eval_examples=batch_size)
    if c.objective.get("mix_groups", 1) > 1:
        c.objective.mix_groups = 4
    c.schedule.update(warmup_epochs=None, per_epoch=False)
    c.checkpoint.every_steps, c.log.every_steps, c.evaluation.every_epochs = 1, 1, None


def mae_encoder(size: str, *, jumbo: bool, fork: bool) -> dict[str, Any]:
    """The encoder that configs/mae.py trains; linear_probe.py and finetune.py begin with it.

    The decoder needs patches that have been through all of the encoder: Jumbo's `last_patch_mlp`.  Weights begin as in
    MAE, by Xavier's rule.  `fork` is the JAX version that the paper used: truncated normal weights, tokens of zeros, a
    sin-cos table that includes the last frequency, tanh-GELU, and in Jumbo's own MLP a residual after the norm.
    """
    variant = {"B": "b16", "L": "l16", "cifar": "ti16"}[size]
    if jumbo and fork:
        return dict(name=f"jumbo_vit_mae_{variant}", init="truncated_normal")
    if jumbo:
        whole = dict(last_patch_mlp=True, wide_norm=False, norm_eps=1e-6)
        return dict(name=f"jumbo_vit_{variant}", position="sincos", layer_scale=None, init="xavier_uniform", **whole)
    if fork:
        begin = dict(init="truncated_normal", token_std=0.0)
        return dict(name=f"vit_{variant}", position="sincos_inclusive", mlp="gelu_tanh", layer_scale=None, **begin)
    return dict(name=f"vit_{variant}", position="sincos", layer_scale=None, init="xavier_uniform")
