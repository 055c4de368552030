"""Export a model for inference: as an ONNX file for ONNX Runtime, TensorRT and others, or as StableHLO.

    python -m equivit.export --input=models/vit_b --output=vit_b.onnx --image_size=336,336
    python -m equivit.export --input=runs/depthwise --output=vit_b.stablehlo --image_size=224,320 --batch=4
    python -m equivit.export --input=runs/segmenter --backbone --output=vit_b.onnx --image_size=336,336

The ending of --output selects the format.  The file contains the weights.  Replaced attention is folded into one
convolution per block, batch norms into the convolutions before them, and positions are resized to --image_size
(`models/inference.py`).  The command runs the file on random images and compares it with the model.  If it deviates by
more than 1e-4 of the largest entry (with --half 1e-2), nothing is written, and an older --output stays.  A file with
--batch=dynamic takes any number of images; it is compared on one and on three.

The input is "image", the output "logits" ("embedding" for a projection).  A model without a head has the outputs
"patches" [B, h, w, D] and, if it has a class token, "class" [B, D], both after the final norm.  An adaptive model also
has "offset", int32 [B, 2], the pixel (row, column) of its first patch (`models/features.py`).  With --backbone a
segmenter is written without its decoder; maps of earlier blocks that the decoder reads are "patches_4" and so on.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from equivit import command, errors, files

FORMATS = (".onnx", ".stablehlo")
LAYOUTS = ("nhwc", "nchw")
OPSET = 17
TOLERANCES = {"float32": 1e-4, "float16": 1e-2}  # relative to the largest entry
DYNAMIC = (1, 3)  # numbers of images on which a file with a dynamic batch is compared
PLATFORMS = ("cpu", "cuda", "tpu")  # of a StableHLO file


class Written(NamedTuple):
    """The files and figures of `write`."""

    path: pathlib.Path
    bytes: int  # size of the file
    parameters: int  # size of the deployed parameters in bytes
    deviation: float  # the largest deviation from the model, relative to the model's largest entry


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_run, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("export", __doc__)
    parser.add_argument("--input", required=True, type=pathlib.Path, help="a saved model, a run or public weights")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="file ending in .onnx or .stablehlo")
    parser.add_argument("--image_size", required=True, type=command.size, help="HEIGHT,WIDTH in pixels")
    parser.add_argument("--batch", type=_batch, default=1, help="images per call (%(default)s), or dynamic")
    parser.add_argument("--layout", choices=LAYOUTS, default="nhwc", help="axes of the input (%(default)s)")
    parser.add_argument("--opset", type=command.at_least(1), help=f"ONNX opset version ({OPSET})")
    parser.add_argument("--backbone", action="store_true", help="write a segmenter without its decoder")
    parser.add_argument("--half", action="store_true", help="parameters, input and computation in float16")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _batch(text: str) -> int | None:
    """The `type` of --batch; None for a dynamic one."""
    if text == "dynamic":
        return None
    try:
        return command.at_least(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or dynamic") from None


def _run(options: argparse.Namespace) -> None:
    from equivit.models.model import check_input
    from equivit.training import loading

    _check_output(options.output, options.opset)
    print(f"Reading the model in {options.input}.", flush=True)
    model, data, step = loading.load(options.input)
    blocks = ()
    if options.backbone:
        model, blocks = _without_decoder(model)
    check_input(model.config, "--image_size", options.image_size, model.config.input_shape[-1])
    of = "" if step is None else f" of step {step}"
    size = "x".join(map(str, options.image_size))
    kind = "float16" if options.half else "float32"
    number = "any number of" if options.batch is None else options.batch
    print(f"Writing {options.output}{of} for {number} {options.layout} image(s) of {size} in {kind}.", flush=True)
    form: dict[str, Any] = dict(
        batch=options.batch, layout=options.layout, opset=options.opset or OPSET, half=options.half
    )
    written = write(options.output, model, options.image_size, classes=data.classes, blocks=blocks, **form)
    print(
        f"Done: {written.path}, {written.bytes / 1e6:.2f} MB, {written.bytes / written.parameters:.3f} times the "
        f"deployed parameters; it deviates from the model by {written.deviation:.1e} of the largest entry (at most "
        f"{TOLERANCES[kind]:g})."
    )


def _check_output(path: pathlib.Path, opset: int | None) -> None:
    _check_ending("--output", path)
    if opset is not None:
        if path.suffix != ".onnx":
            raise ValueError(f"--opset={opset} is only for .onnx; a {path.suffix} file has no such version.")
        from equivit import onnx_files

        onnx_files.check_opset("--opset", opset)
    command.check_file("--output", path)


def _check_ending(name: str, path: pathlib.Path) -> None:
    if path.suffix not in FORMATS:
        raise ValueError(f"{name}={path}: the ending selects the format and must be {' or '.join(FORMATS)}.")


def write(
    path: str | os.PathLike,
    model: Any,
    image_size: tuple[int, int],
    *,
    batch: int | None = 1,
    layout: str = "nhwc",
    opset: int = OPSET,
    half: bool = False,
    classes: Sequence[str] = (),
    blocks: tuple[int, ...] = (),
) -> Written:
    """Write the model for inference, and compare the file with the model.

    Args:
      path: ends in .onnx or .stablehlo.
      batch: the number of images of a call; None for any number.
      layout: axes of the input, "nhwc" or "nchw".
      half: parameters, input and computation in float16.
      classes: names of the classes, in the order of the logits; an .onnx file stores them as JSON in its metadata.
      blocks: of a model without a head, further blocks whose patches are outputs, each after the final norm.

    The model is written as it evaluates, also after `train()`.

    Raises ValueError for an unknown ending, layout or opset, no images, images of a wrong size, or operations that
    cannot be written; or if ONNX Runtime rejects the file, or the file deviates from the model.  Then nothing is
    written, and an older file at `path` stays.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from equivit import kernels
    from equivit.models.inference import deployed
    from equivit.models.model import Switched

    path = pathlib.Path(path)
    _check_ending("path", path)
    errors.one_of("layout", layout, LAYOUTS)
    if batch is not None and batch < 1:
        raise ValueError(f"write: batch={batch} must be positive, or None for any number of images.")
    if isinstance(model, Switched):
        model = model.evaluated()
    outputs, function = _function(model, image_size, blocks)
    onnx, dtype = path.suffix == ".onnx", jnp.float16 if half else jnp.float32
    shape, draw = (*image_size, model.config.input_shape[-1]), np.random.default_rng(0)
    images = [draw.normal(size=(n, *shape)).astype(np.float32) for n in (DYNAMIC if batch is None else (batch,))]
    with jax.default_matmul_precision("highest"):
        wanted = [jax.device_get(jax.jit(function)(model, image)) for image in images]
    form = deployed(model, image_size)
    if half:
        form = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, form)
    inputs = [(image if layout == "nhwc" else image.transpose(0, 3, 1, 2)).astype(dtype) for image in images]

    def call(x):
        return function(form, x if layout == "nhwc" else x.transpose(0, 2, 3, 1))

    with files.replacing(path) as part:
        # Kernels depend on the version of JAX, and the ONNX converter supports only the reference.
        with kernels.using("reference" if onnx else "xla"):
            if onnx:
                metadata = {"classes": json.dumps(list(classes))} if classes else {}
                found = _through_onnx(part, path, call, inputs, outputs, opset=opset, metadata=metadata)
            else:
                found = _through_stablehlo(part, call, inputs)
        pairs = [pair for both in zip(found, wanted, strict=True) for pair in zip(*both, strict=True)]
        deviation = float(np.max([_deviation(a, b) for a, b in pairs]))  # max ignores a NaN after a number
        _check(path, deviation, TOLERANCES[np.dtype(dtype).name])
    parameters = sum(x.nbytes for x in jax.tree.leaves(nnx.state(form, nnx.Param)))
    return Written(path, path.stat().st_size, parameters, deviation)


def _without_decoder(model: Any) -> tuple[Any, tuple[int, ...]]:
    """The backbone of a segmenter, and the blocks before the last that its decoder reads."""
    from equivit.models.segmenter.model import Segmenter

    if not isinstance(model, Segmenter):
        raise ValueError("--backbone: the model has no decoder; leave it out.")
    return model.backbone, model.config.read


def _function(model: Any, image_size: tuple[int, int], blocks: tuple[int, ...]) -> tuple[tuple[str, ...], Callable]:
    """The names of the outputs, and the function of model and images that returns them."""
    from equivit.models.decoders import MaskedAutoencoder
    from equivit.models.model import check_input
    from equivit.models.segmenter.model import Segmenter

    check_input(model.config, "image_size", image_size, model.config.input_shape[-1])
    if isinstance(model, MaskedAutoencoder):
        raise ValueError("--input: a masked autoencoder cannot be exported; convert or export its encoder.")
    if isinstance(model, Segmenter) or model.head is not None:
        if blocks:
            raise ValueError(
                f"blocks={blocks} are outputs of a model without a head; leave it out, or export the backbone."
            )
        name = "logits" if getattr(model.config, "projection", None) is None else "embedding"
        return (name,), lambda model, images: (model(images),)

    def tokens(model, images):
        features = model.features(images, blocks=blocks)
        offset = features.patches.offset if getattr(model.config, "parts", ()) else None
        return *(grid.values for grid in features.grids), features.cls, offset

    import jax

    shape = jax.ShapeDtypeStruct((1, *image_size, model.config.input_shape[-1]), "float32")
    found = jax.eval_shape(tokens, model, shape)
    names = (*(f"patches_{i}" for i in sorted(blocks)), "patches", "class", "offset")
    names = tuple(name for name, value in zip(names, found, strict=True) if value is not None)
    return names, lambda model, images: tuple(value for value in tokens(model, images) if value is not None)


def _shape(inputs: Sequence[Any]) -> Any:
    """Shape and dtype of the inputs; several differ in their batch, which is then symbolic."""
    import jax
    from jax import export

    batch = inputs[0].shape[0] if len(inputs) == 1 else export.symbolic_shape("batch")[0]
    return jax.ShapeDtypeStruct((batch, *inputs[0].shape[1:]), inputs[0].dtype)


def _through_onnx(
    path: pathlib.Path,
    target: pathlib.Path,
    call: Callable,
    inputs: Sequence[Any],
    outputs: tuple[str, ...],
    *,
    opset: int,
    metadata: dict[str, str],
) -> list[list]:
    from equivit import onnx_files

    onnx_files.write(path, call, _shape(inputs), outputs, opset=opset, metadata=metadata)
    try:
        session = onnx_files.session(path, threads=os.cpu_count() or 1)
    except onnx_files.Refused as refused:
        reason = str(refused).replace(str(path), str(target))  # the user's path
        hint = "write a .stablehlo file" if opset == OPSET else f"leave it out for the default, {OPSET}"
        raise ValueError(f"--opset={opset}: nothing was written: {hint}.  ({reason})") from refused
    try:
        return [session.run(list(outputs), {"image": images}) for images in inputs]
    except Exception as error:  # ONNX Runtime's exceptions have no common class
        number = inputs[0].shape[0] if len(inputs) == 1 else "dynamic"
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--batch={number}: ONNX Runtime cannot run the file; nothing was written: give another number of images, "
            f"or write a .stablehlo file.  ({reason})"
        ) from error


def _through_stablehlo(path: pathlib.Path, call: Callable, inputs: Sequence[Any]) -> list[list]:
    import jax
    from jax import export

    from equivit import onnx_files

    onnx_files.library("flatbuffers")  # needed by JAX
    exported = export.export(jax.jit(call), platforms=PLATFORMS)(_shape(inputs))
    path.write_bytes(exported.serialize())
    read = export.deserialize(bytearray(path.read_bytes()))
    return [jax.device_get(read.call(images)) for images in inputs]


def _deviation(found: Any, wanted: Any) -> float:
    """The largest deviation, relative to the largest wanted entry; integers must be equal."""
    import numpy as np

    if np.issubdtype(wanted.dtype, np.integer):
        return 0.0 if np.array_equal(found, wanted) else math.inf
    largest = max(float(np.abs(wanted).max()), float(np.finfo(np.float32).tiny))
    return float(np.abs(found.astype(np.float32) - wanted).max()) / largest


def _check(path: pathlib.Path, deviation: float, tolerance: float) -> None:
    if not deviation <= tolerance:  # also catches NaN
        hint = "try another --opset, or write a .stablehlo file" if path.suffix == ".onnx" else "write an .onnx file"
        hint = "leave out --half" if tolerance > TOLERANCES["float32"] else hint
        raise ValueError(
            f"--output={path}: the file deviates from the model by {deviation:.1e} of the largest entry, more than "
            f"{tolerance:g}; nothing was written: {hint}."
        )


if __name__ == "__main__":
    sys.exit(main())
