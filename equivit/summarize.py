"""Print a model's costs: parameters, multiply-adds by kind, the papers' figures, and the compiled step on any GPUs.

    python -m equivit.summarize --config=configs/octic_h.py:H8 --memory
    python -m equivit.summarize --config=configs/octic_h.py:H8 --config.mesh.fsdp=8 --target=h200x8
    python -m equivit.summarize --model=octic_vit_h14 --model.family=I8 --json

Everything is computed from shapes, so any machine can summarize a model of any size.  With --target the training step
is compiled for GPUs that are not present (`targets`).
"""

import argparse
import functools
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from equivit import command

if TYPE_CHECKING:
    from equivit.models.model import ModelModule
    from equivit.targets import Target

EXAMPLES = {"tfds:imagenet2012": 1_281_167}  # of data that need not be here to summarize
FIGURES = ("macs", "fvcore", "fvcore_unfused", "linear_and_norms", "double_macs")  # of `costs.Costs`


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    example = "Keys can be changed: --config.data.image_size=(384,384) with --config, --model.family=I8 with --model"
    parser = command.parser("summarize", "Parameters, multiply-adds and memory of a model.", epilog=example)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help=command.CONFIG)
    what.add_argument("--model", help="a name of the zoo, such as octic_vit_h14")
    parser.add_argument("--memory", action="store_true", help="also compile a forward pass and a training step; slower")
    parser.add_argument("--target", help="also compile the training step for these GPUs: h200x8, h100x64, a100")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    from equivit.training import config as configs

    target, devices = _described(options.target)  # before all work, which a missing plugin would make useless
    if options.config:
        config, notes = _completed(configs.load(options.config, command.changes(rest, _parser())))
    else:
        config, notes = _named(options.model, command.changes(rest, _parser(), "--model.")), []
    summary = counts(config)
    summary["notes"] += notes
    if options.memory:
        summary |= {"batch_size": config.batch_size, "memory": memory(config)}
    if target:
        summary |= {"batch_size": config.batch_size, "target": on_target(config, target, devices)}
    if options.json:
        print(json.dumps(summary))
    else:
        _print(summary)


def _described(text: str | None) -> tuple["Target | None", list]:
    """The target that a text names, and its devices."""
    import jax

    from equivit import targets

    if text is None:
        return None, []
    jax.config.update("jax_platforms", "cpu")  # otherwise JAX looks for CUDA libraries and refuses the plugin
    target = targets.parse(text)
    return target, targets.devices(target)


def _named(name: str, changes: list[str]) -> ConfigDict:
    """The base config with a model of the zoo, for images of the model's default size."""
    from equivit.models import zoo
    from equivit.training import build
    from equivit.training import config as configs

    config, types = configs.get_base(), zoo.types_of(name)
    fields = {key: configs.parse(text, types.get(key, Any)) for key, _, text in (c.partition("=") for c in changes)}
    config.model = {"name": name, **fields}
    config.data.image_size = build.model_configuration(config).input_shape[:-1]
    return config.lock()


def _completed(config: ConfigDict) -> tuple[ConfigDict, list[str]]:
    """The config, completed from the data as in training, and notes about missing data."""
    from equivit.data import sources
    from equivit.objectives.objective import Objective
    from equivit.objectives.registry import OBJECTIVES

    data, notes, known = config.data, [], {"image_size": config.data.image_size}
    if data.channels is not None:
        known["in_channels"] = data.channels
    missing = {"num_classes", "in_channels"} - set(config.model) - set(known)
    if missing:
        try:
            source = sources.open_source(data, data.split)
            known = {"num_classes": len(source.classes), "in_channels": source.channels, **known}
        except FileNotFoundError:
            notes.append(f"{data.source} is not here; the model's defaults are used for {', '.join(sorted(missing))}")
    config = config.copy_and_resolve_references().unlock()
    config.model = {**known, **config.model}
    objective = OBJECTIVES[config.objective.name]
    if objective.module is not Objective.module and not objective.decodes:
        notes.append(
            f"counts are for the model on whole images, without additions of the {config.objective.name} objective"
        )
    return config.lock(), notes


def counts(config: ConfigDict) -> dict:
    """Count the parameters of the model of a config, and its costs for one image.

    Returns "model" (its section of the config), "image_size", "parameters", "costs" ({kind: {"macs", "operations"}}),
    "macs", "fvcore", "fvcore_unfused", "linear_and_norms", "double_macs" (`costs.py`), "notes".
    """
    import jax
    from flax import nnx

    from equivit import costs

    model, image_size = _abstract_model(config), tuple(config.data.image_size)
    image = jax.ShapeDtypeStruct((1, *image_size, model.config.input_shape[-1]), "float32")
    counted = costs.count(_forward, model, image)
    return {
        "model": config.model.to_dict(),
        "image_size": image_size,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "costs": {kind: vars(cost) for kind, cost in counted.kinds.items()},
        **{name: getattr(counted, name) for name in FIGURES},
        "notes": list(counted.notes),
    }


def memory(config: ConfigDict) -> dict[str, dict[str, int]]:
    """Measure the bytes per device of the compiled forward pass and training step, for the config's batch and mesh.

    Returns {"forward" or "train": {"arguments", "outputs", "temporaries", "peak"}}.  The training step donates its
    state, so outputs that reuse arguments count once in the peak.

    Raises ValueError if the batch does not fit the mesh, or the compiler reports no memory.
    """
    import jax

    from equivit import targets
    from equivit.training import sharding

    mesh = sharding.create_mesh(config.mesh)
    model = _abstract_model(config)
    batch = _batch(config, model.config.input_shape[-1], mesh, training=False)
    with jax.set_mesh(mesh):
        return {
            "forward": targets.memory(_forward_pass(config, model, mesh, batch).compile()),
            "train": targets.memory(_training_step(config, model, mesh).compile()),
        }


def on_target(config: ConfigDict, target: "Target", devices: list) -> dict[str, Any]:
    """Compile the training step of a config for GPUs that are not present, and account for it.

    Returns `targets.estimate`, with "mesh" ({axis: size}).

    Args:
      devices: from `targets.devices`.

    Raises ValueError if the batch does not fit the mesh.
    """
    import jax

    from equivit import targets
    from equivit.training import sharding

    mesh = sharding.create_mesh(config.mesh, devices)
    with jax.set_mesh(mesh), targets.lowering_for(target):
        compiled = targets.compiled(_training_step(config, _abstract_model(config), mesh))
    return {"mesh": dict(mesh.shape), **targets.estimate(compiled, target, _steps(config))}


def _steps(config: ConfigDict) -> int | None:
    """Steps of the whole run; None if they depend on data that are not here."""
    from equivit.data import sources
    from equivit.training.loop import total_steps

    if config.steps is not None:
        return config.steps
    try:
        examples = len(sources.open_source(config.data, config.data.split))
    except FileNotFoundError:
        examples = EXAMPLES.get(config.data.source)
    return examples and total_steps(config, examples // config.batch_size)


def _training_step(config, model, mesh):
    """Lower the training step of a config, as `train` does, with abstract arrays."""
    from equivit import logical
    from equivit.training import build
    from equivit.training.teachers import load_teachers

    complete = config.copy_and_resolve_references().unlock()
    complete.model.num_classes = model.config.num_classes
    teachers = {name: logical.abstract(teacher) for name, teacher in load_teachers(complete).items()}
    # The length of the run is a constant in the step; any length above the warm-up works.
    run = build.make_program(complete, mesh, total=10**9, per_epoch=1, teachers=teachers)
    return run.lower(_batch(config, model.config.input_shape[-1], mesh, training=True))


def _forward_pass(config, model, mesh, batch):
    """Lower the forward pass of an abstract model, with parameters sharded as in training."""
    import jax

    from equivit import logical, precision
    from equivit.data.pixels import normalize
    from equivit.layers.stack import used
    from equivit.training import sharding

    arrays = jax.eval_shape(logical.take, model)
    shardings = sharding.of_tree(mesh, arrays, logical.stack_axes(model))
    on_mesh = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings)

    @jax.jit
    def forward(model, images):
        model = used(model, precision.AtUse(config.precision))
        return _forward(model, normalize(images, config.data.mean, config.data.std))

    return forward.lower(logical.put(model, on_mesh), batch["image"])


def _batch(config, channels, mesh, *, training) -> dict[str, Any]:
    """The abstract global batch; ValueError if it does not fit the mesh."""
    import jax

    from equivit.data import loader
    from equivit.objectives.registry import OBJECTIVES
    from equivit.training import sharding

    sharding.check_batch(config.batch_size, config.optimizer.accumulation, mesh)
    objective = OBJECTIVES[config.objective.name]
    shapes = loader.shapes(
        config.data,
        config.batch_size,
        channels=channels,
        training=training,
        entries=objective.entries,
        transform=objective.transform_of(config),
    )
    rows = jax.sharding.NamedSharding(mesh, sharding.batch(mesh))
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows) for name, a in shapes.items()}


def _forward(model, images):
    """Logits, or the features of a model without a head."""
    return model.features(images) if model.config.num_classes is None else model(images)


def _abstract_model(config: ConfigDict) -> "ModelModule":
    """The model of a config with shapes in place of arrays, with its decoder if the objective adds one."""

    from equivit.models.model import abstract_model
    from equivit.objectives.registry import OBJECTIVES
    from equivit.training import build

    model = build.model_configuration(config)
    if OBJECTIVES[config.objective.name].decodes:
        return build.exported_model(build.make_objective(config), model)
    return abstract_model(model)


def _print(summary: dict) -> None:
    """Print the summary: tables of `rich` on a terminal, aligned columns otherwise."""
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
            ("depthwise: twice the multiply-adds", _giga(summary["double_macs"])),
        ],
    )
    if "memory" in summary:
        parts = ("arguments", "outputs", "temporaries", "peak")
        rows = [(step, *(f"{m[part] / 2**20:,.1f}" for part in parts)) for step, m in summary["memory"].items()]
        _table((f"MiB per device, batch {summary['batch_size']}", *parts), rows)
    if "target" in summary:
        _print_target(summary["target"], summary["batch_size"])
    for note in summary["notes"]:
        print(f"note: {note}.")


def _print_target(found: dict, batch_size: int) -> None:
    from equivit import targets

    for part in targets.report(found, found["mesh"], batch_size):
        if isinstance(part, str):
            print(part)
        else:
            _table(*part)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table: first column left-aligned, numbers right-aligned."""
    if sys.stdout.isatty():
        import rich.box
        import rich.console
        import rich.table

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
