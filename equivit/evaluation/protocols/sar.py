"""Accuracy with and without SAR, test-time adaptation (--config.evaluation.sar.KEY=VALUE)."""

from typing import Any

import jax
from ml_collections import ConfigDict

from equivit import errors
from equivit.evaluation import adaptation
from equivit.evaluation.protocol import Line, Protocol, Run, percent


def check(config: ConfigDict) -> None:
    """ValueError for a batch that the devices do not divide: padding would change the learning rate."""
    size, devices = config.evaluation.sar.batch_size, jax.device_count()
    if config.data.eval_crop == "whole" and devices > 1:
        raise ValueError(
            f"config.data.eval_crop='whole': SAR then adapts to single images, which {devices} devices cannot share; "
            "evaluate on one device."
        )
    if size % devices:
        raise ValueError(
            f"config.evaluation.sar.batch_size={size} must be divisible by the {devices} devices, as SAR adapts to one "
            f"batch after the other; {errors.multiples(size, devices)}."
        )


def opens(run: Run) -> None:
    """ValueError for a model without layer norms to adapt, or for precision "float16"."""
    adaptation.check_precision(run.precision)
    run.open()
    adaptation.adapted(run.model)


def run(run: Run) -> dict[str, Any]:
    """The results of `adaptation.adaptation`, with the settings of `config.evaluation.sar`."""
    options = run.config.evaluation.sar.to_dict()
    pipeline = run.open(batch_size=options.pop("batch_size"), shuffle=True)
    return adaptation.adaptation(
        run.model,
        run.batches(pipeline),
        mean=tuple(run.data.mean),
        std=tuple(run.data.std),
        settings=adaptation.Sar(**options),
        precision=run.precision,
    )


def lines(result: dict[str, Any]) -> list[Line]:
    """One line without adaptation and one with it."""
    seen = f"{percent(result['kept'])} of the images confident, {result['resets']} resets"
    return [
        ("without adaptation", f"{percent(result['unadapted_top1'])}, top-5 {percent(result['unadapted_top5'])}"),
        ("with SAR", f"{percent(result['top1'])}, top-5 {percent(result['top5'])}; {seen}"),
    ]


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, check=check, opens=opens, curve="top1")
