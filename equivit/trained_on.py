"""Facts about a model's training data: class names, the number of examples, and how images were prepared."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from equivit import errors


class TrainedOn(NamedTuple):
    """The training data of a model."""

    # Names of the classes, in the order of the logits; () if there are none, or they are unknown.
    classes: tuple[str, ...] = ()
    examples: int | None = None  # the number of examples; None if unknown
    images: Mapping[str, Any] = MappingProxyType({})  # values of `data.config.PREPARATION`; empty if unknown

    def to_json(self) -> dict[str, Any]:
        """Convert to the values of a JSON object."""
        images = {"images": dict(self.images)} if self.images else {}
        return {"classes": list(self.classes), "examples": self.examples, **images}


UNKNOWN = TrainedOn()


def from_json(found: Mapping[str, Any]) -> TrainedOn:
    """Read the values of `TrainedOn.to_json`; ValueError for anything else."""
    classes, examples, images = found.get("classes", []), found.get("examples"), found.get("images", {})
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("'classes' must be a list of names")
    if examples is not None and (not isinstance(examples, int) or isinstance(examples, bool)):
        raise ValueError("'examples' must be a whole number")
    if not isinstance(images, dict):
        raise ValueError("'images' must be an object")
    images = {key: tuple(value) if isinstance(value, list) else value for key, value in images.items()}
    return TrainedOn(tuple(classes), examples, images)


def check_classes(thing: str, classes: Sequence[str], before: Sequence[str], place: object, fix: str) -> None:
    """ValueError if class names of data and model differ, so that labels would mean different classes.

    Numeric names "0", "1", ... are not compared.  The message has the data `thing` of these classes, the `place` of the
    model's classes `before`, and a remedy, `fix`.
    """
    if not (_named(classes) and _named(before)) or tuple(classes) == tuple(before):
        return
    label = next((k for k, (a, b) in enumerate(zip(classes, before, strict=False)) if a != b), None)
    known, new = set(before), [name for name in classes if name not in set(before)]
    missing = [name for name in before if name not in set(classes)]
    parts = [f"new are {errors.listed(new)}"] if new else []
    parts += [f"missing are {errors.listed(missing)}"] if missing else []
    parts += [] if known ^ set(classes) else ["they are in another order"]
    where = (
        f"class {label} is {classes[label]!r}, in {place} it is {before[label]!r}"
        if label is not None
        else (f"there are {len(classes)} classes, in {place} {len(before)}")
    )
    raise ValueError(f"{thing}: {where} ({'; '.join(parts)}), so labels would mean other classes; {fix}.")


def _named(classes: Iterable[str]) -> bool:
    return any(name != str(label) for label, name in enumerate(classes))
