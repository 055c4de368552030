"""Print a model's costs: parameters, multiply-adds by kind, the papers' figures, and the memory of a compiled step.

    python -m equivit.summarize --config=configs/octic_h.py:H8 --memory
    python -m equivit.summarize --model=octic_vit_h14 --model.family=I8 --json

Everything is worked out on shapes alone, so any size can be asked for on any machine.
"""

import argparse
import functools
import json
import sys
from typing import Any

from ml_collections import ConfigDict

from equivit import command


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


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
    from equivit import footprint
    from equivit.training import config as configs

    if options.config:
        config, notes = _completed(configs.load(options.config, command.changes(rest, _parser())))
    else:
        config, notes = _named(options.model, command.changes(rest, _parser(), "--model.")), []
    summary = footprint.counts(config)
    summary["notes"] += notes
    if options.memory:
        summary |= {"batch_size": config.batch_size, "memory": footprint.memory(config)}
    if options.json:
        print(json.dumps(summary))
    else:
        _print(summary)


def _named(name: str, changes: list[str]) -> ConfigDict:
    """The base config with a model of the zoo, for images of the size that the model was made for."""
    from equivit import footprint
    from equivit.models import zoo
    from equivit.training import config as configs

    config, types = configs.get_base(), zoo.types_of(name)
    fields = {key: configs.parse(text, types.get(key, Any)) for key, _, text in (c.partition("=") for c in changes)}
    config.model = {"name": name, **fields}
    config.data.image_size = footprint.abstract_model(config).config.input_shape[:-1]
    return config.lock()


def _completed(config: ConfigDict) -> tuple[ConfigDict, list[str]]:
    """The config with what the data decide about the model, as in training, and notes on what is not known."""
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
            notes.append(f"{data.source} is not here; left as the model has it: {', '.join(sorted(missing))}")
    config = config.copy_and_resolve_references().unlock()
    config.model = {**known, **config.model}
    objective = OBJECTIVES[config.objective.name]
    if objective.module is not Objective.module and not objective.decodes:
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
            ("depthwise: twice the multiply-adds", _giga(summary["double_macs"])),
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
