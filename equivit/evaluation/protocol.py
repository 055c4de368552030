"""The interface of a protocol: its requirements on a model, and its input."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, trained_on
from equivit.constraints import Size
from equivit.data import loader
from equivit.data.loader import EvaluationPipeline
from equivit.evaluation import label_maps, predictions
from equivit.evaluation.predictions import Batch, Predict
from equivit.models.model import ModelModule, check_input

NEEDS = {  # the possible requirements of a protocol, and the models that meet them
    "logits": "classifiers",
    "features": "models with features",
    "reconstruction": "masked autoencoders",
    "maps": "models that predict label maps",
}
FOLDERS = "  If class folders lack classes, put them next to the complete ones, as another split of the same folder."
Line = tuple[str, str]
Track = Callable[[Iterable[Batch], int, str], Iterable[Batch]]


def offers(model: nnx.Module) -> set[str]:
    """The NEEDS that a model offers.

    logits: `model(images)` returns logits of the image: there is neither a decoder nor `label_maps`, and
      `model.config.num_classes`, if it exists, is set;
    features: `model.features(images)`;
    reconstruction: there is a decoder, and `model(images, keep=keep)` predicts the patches;
    maps: `model.label_maps(images)`, and `model(images)` returns logits for each pixel.
    """
    offered = {need for need, method in (("features", "features"), ("maps", "label_maps")) if hasattr(model, method)}
    if "maps" in offered:
        return offered
    if hasattr(model, "decoder"):
        return offered | {"reconstruction"}
    headless = getattr(getattr(model, "config", None), "num_classes", "unknown") is None
    return offered if headless else offered | {"logits"}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One way to evaluate a model."""

    needs: frozenset[str]  # the requirements on a model, a subset of NEEDS
    # Returns the results for evaluation.json; single numbers also go into the metrics of a run.
    run: Callable[["Run"], dict[str, Any]]
    lines: Callable[[dict[str, Any]], list[Line]]  # the results as readable (name, value) lines
    # These are called before anything runs.  `check` raises ValueError for an unfit config.  `data` returns the first
    # section that the protocol reads.  `opens` opens its data, and raises ValueError or FileNotFoundError if the data
    # or the model, which may be abstract, do not fit.
    check: Callable[[ConfigDict], object] = lambda config: None
    data: Callable[[ConfigDict], ConfigDict] = lambda config: config.data
    opens: Callable[["Run"], object] = lambda run: run.open()
    # The model's input sizes for images of a size, by key of the config.
    inputs: Callable[[ConfigDict, Size], dict[str, Size]] = lambda config, size: {"config.data.image_size": size}
    curve: str | None = None  # the result to plot over the steps of a run, a fraction or a "loss"
    loss: str | None = None  # the result to plot beside the training loss, if it is not `curve`
    default: bool = False  # whether it is in the default suite
    # Draws a PNG, of the run and its results; all processes call it.
    figure: Callable[["Run", dict[str, Any], pathlib.Path], None] | None = None
    blocks: Callable[[ConfigDict], int] = lambda config: 1  # the number of last blocks with frozen features (frozen.py)

    def __post_init__(self):
        if unknown := self.needs - NEEDS.keys():
            raise ValueError(f"protocol: needs={sorted(unknown)}; a protocol can need {', '.join(NEEDS)}.")


@dataclasses.dataclass(frozen=True)
class Run:
    """The input of a protocol."""

    model: ModelModule  # the model, with its trained parameters in float32
    config: ConfigDict  # the config of the run; `data`, `evaluation`, `precision`, `batch_size` and `seed` are used
    protocol: Protocol
    data: ConfigDict  # the `data` section to read, from the config or a variant of it
    stream: str  # the name of the data, for display
    track: Track | None = None  # shows progress
    blocks: int = 1  # the number of last blocks with frozen features, the maximum over the protocols of the suite
    # The cached frozen features, shared by all protocols of the suite (`evaluation/frozen.py`).
    frozen: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    directory: pathlib.Path | None = None  # directory for the state of interrupted protocols; None: nothing is stored
    classes: tuple[str, ...] = ()  # names of the model's classes; () if unknown

    def on(self, data: ConfigDict, name: str) -> "Run":
        """The same run on another `data` section."""
        return dataclasses.replace(self, data=data, stream=f"{self.stream}, {name}")

    @property
    def precision(self) -> str:
        """The precision of the model's computation."""
        return self.config.get("precision", "float32")

    @functools.cached_property
    def predict(self) -> Predict:
        """Pixels to logits (`predictions.predictor`)."""
        return predictions.predictor(self.model, self.data.mean, self.data.std, self.precision)

    def open(
        self,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        data: ConfigDict | None = None,
        split: str | None = None,
    ) -> EvaluationPipeline:
        """Open the evaluation split, or another; the batch size is rounded up to a multiple of the number of devices.

        Whole images (`data.eval_crop`) differ in size, so a batch has one image, and every process reads all.

        Args:
          data: the section to read, if its images are larger than the model's input.

        Raises ValueError if the data cannot be read or do not have the model's input size; or the protocol needs logits
        or label maps, and the model has other classes or the data no maps.
        """
        share: dict[str, Any] = dict(batch_size=1)
        if not self.whole:
            devices = jax.device_count()
            share["batch_size"] = -(-(batch_size or self.config.batch_size) // devices) * devices
            share |= dict(process_index=jax.process_index(), process_count=jax.process_count())
        section = self.data if data is None else data
        options: dict[str, Any] = dict(split=split, seed=self.config.seed, workers=section.workers)
        pipeline = loader.evaluate(section, shuffle=shuffle, **options, **share)
        if "maps" in self.protocol.needs:
            self._check_maps(pipeline, split)
        inputs = self._inputs(pipeline)
        if hasattr(self.model, "config"):
            for name, size in inputs.items():
                check_input(self.model.config, name, size, pipeline.channels)
        if self.protocol.needs & {"logits", "maps"}:
            self._check_classes(pipeline, next(iter(inputs.values())))
        return pipeline

    def batches(self, pipeline: EvaluationPipeline | None = None) -> Iterable[Batch]:
        """The batches of `pipeline`, by default of the split from `open`."""
        pipeline = pipeline or self.open()
        batches = map(_for_each_device, pipeline.batches()) if self.whole else pipeline.batches()
        return batches if self.track is None else self.track(batches, pipeline.num_batches, self.stream)

    @property
    def whole(self) -> bool:
        """Whether the model sees whole images, each at its original size."""
        return self.data.eval_crop == "whole"

    def _inputs(self, pipeline) -> dict[str, Size]:
        """The sizes of the images for the model; for whole images, the size of the first."""
        if not self.whole:
            height, width = self.data.image_size
            return self.protocol.inputs(self.config, (height, width))
        height, width = pipeline.shapes()["image"].shape[1:3]
        by_key = self.protocol.inputs(self.config, (height, width))
        whole = f"config.data.multiple={self.data.multiple}: an image of {self.data.source}"
        return {key.replace("config.data.image_size", whole): size for key, size in by_key.items()}

    def _check_maps(self, pipeline, split):
        label_maps.check_model(self.model, label_maps.settings(self.config))
        if "map" not in (entries := pipeline.shapes()):
            found = ", ".join(name for name in entries if name not in ("weight", "index"))
            raise ValueError(
                f"evaluation: this protocol needs label maps, and an example of {self.data.source} has only {found}; "
                "set data.source to data with maps, such as an .npz file with `<split>_map`."
            )
        pipeline.check_labelled(split or self.data.eval_split, tuple(self.data.void))

    def _check_classes(self, pipeline, size):
        classes = getattr(getattr(self.model, "config", None), "num_classes", None)
        if classes is None:  # the model has no such attribute
            images = jax.ShapeDtypeStruct((jax.device_count(), *size, pipeline.channels), np.uint8)
            predict = predictions.predictor(self.model, self.data.mean, self.data.std)
            classes = jax.eval_shape(predict, images).shape[-1]
        if classes != pipeline.num_classes:
            folders = "" if "maps" in self.protocol.needs else FOLDERS
            raise ValueError(
                f"evaluation: the model has {classes} classes, the data ({self.data.source}) {pipeline.num_classes}; "
                f"set data.source to the data that the model was trained on, or use another model.{folders}"
            )
        trained_on.check_classes(
            f"config.data.source={errors.shown(self.data.source)}",
            pipeline.classes,
            self.classes,
            "the data of the model",
            "evaluate on data with the model's class names, in the same order",
        )


def _for_each_device(batch: Batch) -> Batch:
    """Repeat one image for all devices of this process; it counts once."""
    rows = {name: np.repeat(value, jax.local_device_count(), axis=0) for name, value in batch.items()}
    rows["weight"][1 if jax.process_index() == 0 else 0 :] = 0
    return rows


def percent(share: float) -> str:
    """0.75 as "75.0 %"."""
    return f"{100 * share:.1f} %"
