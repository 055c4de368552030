"""Accuracy with and without SAR, test-time adaptation (--config.evaluation.sar.KEY=VALUE)."""

from typing import Any

from ml_collections import ConfigDict

from equivit.evaluation import adaptation
from equivit.evaluation.protocol import Line, Protocol, Run, percent


def run(run: Run) -> dict[str, Any]:
    """What `adaptation.adaptation` returns, with the settings of `config.evaluation.sar`."""
    pipeline = run.open(batch_size=run.config.evaluation.sar.batch_size, shuffle=True)
    return adaptation.adaptation(
        run.model,
        run.batches(pipeline),
        mean=tuple(run.data.mean),
        std=tuple(run.data.std),
        settings=_settings(run.config),
        precision=run.precision,
    )


def lines(result: dict[str, Any]) -> list[Line]:
    """One line without adaptation and one with it."""
    seen = f"{percent(result['kept'])} of the images confident, {result['resets']} resets"
    return [
        ("without adaptation", f"{percent(result['unadapted_top1'])}, top-5 {percent(result['unadapted_top5'])}"),
        ("with SAR", f"{percent(result['top1'])}, top-5 {percent(result['top5'])}; {seen}"),
    ]


def check(config: ConfigDict) -> None:
    """ValueError for impossible settings."""
    _settings(config)


def _settings(config: ConfigDict) -> adaptation.Sar:
    options = config.evaluation.sar.to_dict()
    del options["batch_size"]
    return adaptation.Sar(**options)


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, check=check)
