"""Files of runs, sweeps and accelerations: config.json, metrics.jsonl, saved models and reports."""

import argparse
import json
import pathlib
import struct
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx
from hypothesis import strategies as st

from equivit import files, logical, metrics_files, staged, sweep
from equivit.acceleration import plan
from equivit.layers.rngs import Keys
from equivit.models import saved, zoo
from equivit.training import config as configs
from equivit.training import logging, sweep_config
from equivit.training.run import resuming
from tests.fuzz.attack import Files, Reader, made_in_child
from tests.fuzz.mutations import damaged, document, one_of_files
from tests.fuzz.weights import TYPES, with_header

DATA = {"classes": ["a", "b", "c"], "examples": 9}
MODEL, PARAMETERS = "model.json", "parameters.safetensors"


def _models() -> list[Files]:
    """Small models as they are saved, all parameters 0."""
    found, fields = [], dict(depth=2, width=16, num_heads=2, image_size=(32, 32), num_classes=3)
    for name in ("vit_ti16", "octic_vit_ti16"):
        config = zoo.configuration(name, **fields)
        shapes = jax.eval_shape(lambda config=config: logical.to_logical(config.build(Keys(0)), nnx.Variable))
        parameters = safetensors.numpy.save({name: np.zeros(like.shape, like.dtype) for name, like in shapes.items()})
        found.append(
            {MODEL: json.dumps(saved._described(config) | {saved.TRAINED_ON: DATA}).encode(), PARAMETERS: parameters}
        )
    return found


@st.composite
def model(draw, whole: Files) -> Files:
    """A saved model with its configuration or the header of its parameters changed."""
    header, data = _split(whole[PARAMETERS])
    parameters = document(header, more=(*TYPES, [0, 4], [1], [])).map(lambda text: with_header(text, data))
    parameters = st.one_of(parameters, damaged(whole[PARAMETERS]))
    return draw(
        one_of_files(
            whole, {MODEL: document(json.loads(whole[MODEL]), more=tuple(zoo.CONFIGS)), PARAMETERS: parameters}
        )
    )


def read_model(folder: pathlib.Path) -> Any:
    """The model, and what it was trained on."""
    return saved.load(folder), saved.trained_on(folder)


def _split(content: bytes) -> tuple[dict, bytes]:
    """The header and the data of a .safetensors file."""
    (size,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + size]), content[8 + size :]


LINES = [
    b'{"step": 1, "loss": 2.5, "lr": 1e-3}',
    b'{"step": 2, "loss": 2.25, "eval/accuracy/top1": 0.5}',
    b'{"step": 3, "loss": NaN}',
]


@st.composite
def metrics(draw) -> Files:
    """Lines of metrics, some of them changed, doubled or left out."""
    lines = [draw(document(json.loads(line), 2)) if draw(st.booleans()) else line for line in LINES]
    content = draw(st.sampled_from((b"\n",) * 5 + (b"\r\n", b"\x0c"))).join(lines) + draw(
        st.sampled_from((b"\n", b"", b"\n\n", b'\n{"step"'))
    )
    return {"metrics.jsonl": draw(damaged(content)) if draw(st.integers(0, 5)) == 5 else content}


def read_metrics(folder: pathlib.Path) -> Any:
    """As a run that goes on after step 2."""
    logging._drop_later_lines(folder / "metrics.jsonl", 2)
    return [row["step"] / 1 for row in metrics_files.rows(folder / "metrics.jsonl")]


SWEEP = sweep_config.get_base()
RESULT = json.dumps(
    dict(
        data="a",
        best=dict(lr=0.1, dropout=0.0),
        runs=[{}],
        test_mean=0.5,
        seconds=1.0,
        recipe=sweep_config.recipe(SWEEP),
    )
)
ARGUMENTS = dict(num_heads=None, image_size=None, mlp=None, blocks=2, heads=None, images=64, fit_only=True)
ARGUMENTS |= dict(kind="dw", form="released", order="lowest", start=None)


def read_claim(folder: pathlib.Path) -> Any:
    """As an acceleration that goes on."""
    options = argparse.Namespace(
        **dict.fromkeys(plan.HINTS) | ARGUMENTS,
        weights="timm:a.pth",
        input=None,
        config="c.py",
        workdir=folder,
    )
    return staged.claim(options, plan.DECISIONS, ["a=1"], weights="0a")


CLAIM = dict(ARGUMENTS, weights="0a", source="timm:a.pth", config="c.py", changes=["a=1"]) | dict.fromkeys(plan.HINTS)
CONFIG = configs.get_base("supervised")
CONFIG.steps = 3


def _one(name: str, value: Any, more: tuple = ()) -> tuple[Files, st.SearchStrategy[Files]]:
    """A file of JSON, and damaged ones."""
    return {name: json.dumps(value).encode()}, st.builds(lambda content: {name: content}, document(value, more=more))


MODELS = made_in_child(_models)
READERS = (
    *(
        Reader(f"saved models: {kind}", whole, model(whole), read_model)
        for kind, whole in zip(("ViT", "octic ViT"), MODELS, strict=True)
    ),
    Reader(
        "config.json",
        *_one("config.json", configs.plain(CONFIG)),
        lambda folder: configs.from_json(folder / "config.json"),
    ),
    Reader("run.json", *_one("run.json", DATA | {"jax": "0"}), resuming.data_before),
    Reader(
        "metrics.jsonl",
        {"metrics.jsonl": b"\n".join(LINES) + b"\n"},
        metrics(),
        read_metrics,
        writes=True,
        lenient=True,
    ),
    Reader(
        "sweep's results", *_one("a.json", json.loads(RESULT)), lambda folder: sweep._stored(folder / "a.json", SWEEP)
    ),
    Reader("accelerate's arguments", *_one("arguments.json", CLAIM), read_claim),
    Reader("reports", *_one("report.json", {"a": 1}), lambda folder: files.read_json(folder / "report.json", "a")["a"]),
)
