"""What a model costs: parameters, multiply-adds by kind, the papers' figures, and the memory of a compiled step.

    python -m equivit.summarize --config=configs/octic_h.py:H8 --memory
    python -m equivit.summarize --model=octic_vit_h14 --model.family=I8 --json

Everything is worked out on shapes alone, so any size can be asked for on any machine.
"""

import argparse
import ast
import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.table
from flax import nnx
from ml_collections import ConfigDict

from equivit import command, costs, logical
from equivit.data import sources
from equivit.data.pixels import normalize
from equivit.models import zoo
from equivit.objectives.objective import Objective
from equivit.objectives.registry import OBJECTIVES
from equivit.training import config as configs
from equivit.training import program, sharding, start


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


def summarize(config: ConfigDict) -> dict:
    """Parameters of the model of a config, and its costs for one image.

    Returns:
      "model" (its section of the config), "image_size", "parameters", "costs" ({kind: {"macs", "operations"}}), "macs",
      "fvcore", "fvcore_unfused", "linear_and_norms" (`equivit/costs.py`), "notes".
    """
    model, image_size = _model(config), tuple(config.data.image_size)
    image = jax.ShapeDtypeStruct((1, *image_size, model.config.in_channels), jnp.float32)
    counted = costs.count(_forward, model, image)
    return {
        "model": config.model.to_dict(),
        "image_size": image_size,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "costs": {kind: vars(cost) for kind, cost in counted.kinds.items()},
        "macs": counted.macs,
        "fvcore": counted.fvcore,
        "fvcore_unfused": counted.fvcore_unfused,
        "linear_and_norms": counted.linear_and_norms,
        "notes": list(counted.notes),
    }


def memory(config: ConfigDict) -> dict[str, dict[str, int]]:
    """Bytes on each device of the compiled forward pass and training step, for the batch and mesh of the config.

    Returns {"forward" or "train": {"arguments", "outputs", "temporaries", "peak"}}; the training step gives its state's
    memory to the new state, so outputs that reuse arguments are not in the peak twice.
    """
    mesh = sharding.create_mesh(config.mesh)
    sharding.check_batch(config.batch_size, config.optimizer.accumulation, mesh)
    model = _model(config)
    channels, data = model.config.in_channels, config.data
    batch, train_batch = (
        _batch(config, size, channels, mesh) for size in (data.image_size, data.train_image_size or data.image_size)
    )
    forward = jax.jit(lambda m, images: _forward(m, normalize(images, config.data.mean, config.data.std)))
    with jax.set_mesh(mesh):
        return {
            "forward": _bytes(forward.lower(_placed(model, mesh), batch["image"]).compile()),
            "train": _bytes(_train_step(config, model.config.num_classes, mesh, train_batch).compile()),
        }


def _placed(model, mesh):
    """The abstract model with its parameters where training has them."""
    arrays = jax.eval_shape(logical.take, model)
    where = sharding.of_tree(mesh, arrays, logical.stack_axes(model))
    return logical.put(
        model, jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, where)
    )


def _train_step(config, num_classes, mesh, batch):
    """The lowered training step of a config."""
    config = config.copy_and_resolve_references().unlock()
    config.model.num_classes = num_classes
    # The length of the run is a constant inside the step: any that the warm-up fits into will do.
    run = program.of_config(config, mesh, total=10**9, per_epoch=1, given=start.given_models(config))
    return run.lower(batch)


def _batch(config, image_size, channels, mesh):
    sharded = jax.sharding.NamedSharding(mesh, sharding.BATCH)
    shapes = {"image": ((*image_size, channels), np.uint8), "label": ((), np.int32)}
    return {
        name: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype, sharding=sharded)
        for name, (shape, dtype) in shapes.items()
    }


def _bytes(compiled) -> dict[str, int]:
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("--memory: this platform's compiler does not tell how much memory a program takes.")
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "peak": held + stats.temp_size_in_bytes,
    }


def _forward(model, images):
    """Logits, or the features of a model without a head."""
    return model.features(images) if model.config.num_classes is None else model(images)


def _model(config: ConfigDict) -> nnx.Module:
    """The model of a config with shapes in place of arrays."""
    try:
        return zoo.abstract(**config.model)
    except TypeError as error:  # a value of the wrong type is only noticed where it is used
        given = ", ".join(f"{key}={value!r}" for key, value in config.model.items() if key != "name")
        raise ValueError(f"model {config.model.name}: cannot be built with {given}: {error}.") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m equivit.summarize",
        description="Parameters, multiply-adds and memory of a model.",
        epilog="Keys can be changed: --config.data.image_size=(384,384) with --config, --model.family=I8 with --model",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a file of configs/, and after a colon its mode")
    what.add_argument("--model", help="a name of the zoo, such as octic_vit_h14")
    parser.add_argument("--memory", action="store_true", help="compile a forward pass and a training step too; slower")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    if options.config:
        config, notes = _completed(configs.load(options.config, command.changes(rest, _parser())))
    else:
        config, notes = _named(options.model, command.changes(rest, _parser(), "--model.")), []
    summary = summarize(config)
    summary["notes"] += notes
    if options.memory:
        summary |= {"batch_size": config.batch_size, "memory": memory(config)}
    if options.json:
        print(json.dumps(summary))
    else:
        _print(summary)


def _named(name: str, changes: list[str]) -> ConfigDict:
    """The base config with a model of the zoo, for images of the size that the model was made for."""
    config = configs.get_base()
    config.model = {"name": name, **{key: _value(text) for key, _, text in (c.partition("=") for c in changes)}}
    config.data.image_size = _model(config).config.image_size
    return config.lock()


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _completed(config: ConfigDict) -> tuple[ConfigDict, list[str]]:
    """The config with what the data decide about the model, as in training, and notes on what is not known."""
    data, notes, known = config.data, [], {"image_size": config.data.image_size}
    if data.channels is not None:
        known["in_channels"] = data.channels
    missing = {"num_classes", "in_channels"} - set(config.model) - set(known)
    if missing:
        try:
            source = sources.open_source(data, data.split)
            known = {"num_classes": len(source.classes), "in_channels": source.channels, **known}
        except FileNotFoundError:
            notes.append(f"{data.source} is not here; left as the model has it: {', '.join(sorted(missing))}")
    config = config.copy_and_resolve_references().unlock()
    config.model = {**known, **config.model}
    if OBJECTIVES[config.objective.name].module is not Objective.module:
        notes.append(
            f"counts are of the model on whole images, without what the {config.objective.name} objective adds"
        )
    return config.lock(), notes


def _print(summary: dict) -> None:
    """The summary for people: tables of `rich` on a terminal, aligned columns otherwise."""
    model = ", ".join(f"{key}={value}" for key, value in summary["model"].items() if key != "name")
    size = "x".join(map(str, summary["image_size"]))
    print(f"{summary['model']['name']}{f' ({model})' if model else ''}, one image of {size}")
    print(f"parameters: {summary['parameters']:,} ({summary['parameters'] / 1e6:.2f} M)")
    rows = [(kind, _giga(c["macs"]), _giga(c["operations"])) for kind, c in summary["costs"].items()]
    total = (_giga(sum(c[key] for c in summary["costs"].values())) for key in ("macs", "operations"))
    _table(("forward", "GMACs", "other operations, G"), [*rows, ("all", *total)])
    _table(
        ("figure of a paper", "G"),
        [
            ("octic ViTs: fvcore, attention fused", _giga(summary["fvcore"])),
            ("flip ViTs: fvcore, attention unfused", _giga(summary["fvcore_unfused"])),
            ("Jumbo: linear maps and norms", _giga(summary["linear_and_norms"])),
        ],
    )
    if "memory" in summary:
        parts = ("arguments", "outputs", "temporaries", "peak")
        rows = [(step, *(f"{m[part] / 2**20:,.1f}" for part in parts)) for step, m in summary["memory"].items()]
        _table((f"MiB a device, batch {summary['batch_size']}", *parts), rows)
    for note in summary["notes"]:
        print(f"note: {note}.")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """First column to the left, numbers to the right."""
    if sys.stdout.isatty():
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        rich.console.Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *others in (header, *rows):
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([f"{first:{widths[0]}}", *cells]).rstrip())


def _giga(count: int) -> str:
    return f"{count / 1e9:.3f}"


if __name__ == "__main__":
    sys.exit(main())
