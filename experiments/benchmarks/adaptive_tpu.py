"""Cycles of adaptive and of ordinary models on TPU v5e, estimated from libtpu's program, without a TPU.

    pip install "jax[tpu]==0.12.0.1" -r requirements.txt
    python -m experiments benchmarks.adaptive_tpu  # about half an hour on two cores

Forward passes of 64 images of the published size in float32, with JAX's default precision of products, bfloat16.
Nothing runs.  `tpu_compile` says what an estimate is and leaves out; here arguments lie as a program gets them.
"""

import functools
import importlib.metadata
import itertools
import pathlib
from collections.abc import Sequence

import jax

from experiments import findings, flags
from experiments.benchmarks.adaptive_program import FORMS, MODELS, whole
from experiments.benchmarks.tpu_compile import TOPOLOGY, chip, compiled, described_chip, estimate

BATCH = 64
COLUMNS = dict(model="", form="form", kcycles="kcycles", bundle_kcycles="bundles", matrix_kcycles="matrix units")
COLUMNS |= dict(memory_kcycles="HBM", seconds="s to compile")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument(
        "--models", type=flags.one_of(tuple(MODELS)), default=["Swin-T", "CvT-13"], help="such as Swin-T,CvT-13"
    )
    options = parser.parse_args(arguments)
    with described_chip() as folder:
        facts = dict(topology=TOPOLOGY, libtpu=importlib.metadata.version("libtpu"), batch=BATCH)
        entry = findings.Entry(options, facts)
        entry.keep(("model", "form"), itertools.product(options.models, FORMS))
        rows = entry.measured(functools.partial(row, folder=folder), COLUMNS)
    print(findings.table(rows, COLUMNS))
    return entry.finish([])


def row(model: str, form: str, folder: pathlib.Path) -> dict:
    """The estimate of a forward pass."""
    function, arguments = whole(model, "forward", form, BATCH)
    seconds, _, works = compiled(jax.jit(function, in_shardings=chip(), out_shardings=chip()), arguments, folder)
    return dict(model=model, form=form, **estimate(works), seconds=seconds)
