"""The eight convolutional models and BiXT on a CPU, as they are and folded, beside timm's under `torch.compile`.

    python experiments/conv_models_cpu.py --peer=torch-venv/bin/python    # about half an hour
    python experiments/conv_models_cpu.py                                 # without timm
    python experiments/conv_models_cpu.py --peer=... --models=shvit_s1,efficientvit_b0 --runs=5

The peer is a Python that has torch and timm (`torch_timm.py` says how to make one); equivit needs neither.

Forward passes of 8 images of 224 px in float32, every parameter random, on 2 threads: after a warm-up, medians, the
variants in turn within each round.  timm's run in a process of their own, with a pause between turns: threads of one
library that spin while they wait for work would slow the other down.  They run in torch's usual layout of maps and with
the channels last, and count by the faster one.  Both models must have the same number of parameters.  The load of the
machine before each model is noted: others' work falsifies the figures.  Not in the paper.

Claims: as it is, each convolutional model takes at most 1.5 times as long as timm's.  BiXT, at most 1.1 times, is not
in timm.  Exits 1 when one fails.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from equivit import logical
from equivit.models import zoo
from equivit.models.folding import fold
from experiments import benchmark, programs
from experiments.benchmark import Claim
from experiments.octic_block_cpu import in_turn

CONVOLUTIONAL = (
    "efficientvit_b0",
    "efficientvit_b1",
    "shvit_s1",
    "shvit_s2",
    "shvit_s3",
    "mobilenetv4_conv_small",
    "mobilenetv4_conv_medium",
    "mobilenetv4_hybrid_medium",
)
THREADS = 2
LIMITS = dict.fromkeys(CONVOLUTIONAL, 1.5) | {"bixt_ti_p16": 1.1}  # times the peer's time
LAYOUTS = ("contiguous", "channels_last")  # of the peer's maps


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = benchmark.Budget(options.minutes), []
    for name in options.models:
        if name not in zoo.names():
            print(f"{name}: not in the zoo; skipped", flush=True)
        elif budget.allows(name):
            with budget.trying(name):
                rows.append(measure(name, options))
                print(benchmark.table(rows[-1:], COLUMNS), flush=True)
    print(f"\nmilliseconds for {options.batch} images of {options.size} px, on {THREADS} threads")
    print(benchmark.table(rows, COLUMNS))
    facts = dict(batch=options.batch, size=options.size, runs=options.runs, threads=THREADS)
    return benchmark.finish(options.output, dict(**facts, rows=rows), list(map(claim_of, rows)), budget)


COLUMNS = dict(
    model="model",
    load="load",
    ours="ours",
    folded="folded",
    contiguous="timm",
    channels_last="channels last",
    over_peer="ours/timm",
    folded_over_peer="folded/timm",
)


def _options(arguments):
    options = benchmark.timing_parser(__doc__, output="conv_models_cpu.json", runs=20, warmup=3, minutes=40)
    options.add_argument("--peer", help="a Python with torch and timm; without it nothing is compared")
    options.add_argument("--models", type=benchmark.one_of(list(LIMITS)), default=list(LIMITS))
    options.add_argument("--batch", type=int, default=8, help="images (%(default)s)")
    options.add_argument("--size", type=int, default=224, help="their height and width (%(default)s)")
    return options.parse_args(arguments)


def measure(name: str, options) -> dict:
    """Median milliseconds of each variant of a model.

    Raises RuntimeError when timm's has another number of parameters, or gives no answer.
    """
    load = os.getloadavg()[0]
    model = programs.random_model(name, image_size=(options.size, options.size))
    x = np.random.default_rng(1).normal(size=(options.batch, options.size, options.size, 3)).astype(np.float32)
    variants = {"ours": ours(model, x), "folded": ours(jax.jit(fold)(model), x)}
    with contextlib.ExitStack() as stack:
        if options.peer and name in CONVOLUTIONAL:
            peer = stack.enter_context(contextlib.closing(Peer(options.peer)))
            parameters = sum(array.size for array in logical.take(model).values())  # without running statistics
            variants |= {layout: peer.variant(name, layout, x.shape, parameters) for layout in LAYOUTS}
        seconds = benchmark.medians(in_turn(variants, options.warmup, options.runs))
    times = {variant: 1e3 * value for variant, value in seconds.items()}
    fastest = min((times[layout] for layout in LAYOUTS if layout in times), default=None)
    row = dict(model=name, load=load, **times, over_peer=benchmark.ratio(times["ours"], fastest))
    return row | dict(folded_over_peer=benchmark.ratio(times["folded"], fastest))


def ours(model, x: np.ndarray) -> Callable[[], float]:
    """A call that runs the compiled model and returns its seconds.

    A call runs the model twice and times the second: the first one wakes threads and fills caches.
    """
    leaves, structure = jax.tree.flatten(model)  # a module is slow to flatten
    arguments = jax.device_put(leaves), jnp.asarray(x)
    compiled = jax.jit(lambda leaves, x: jax.tree.unflatten(structure, leaves)(x)).lower(*arguments).compile()

    def call():
        jax.block_until_ready(compiled(*arguments))
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - start

    return call


class Peer:
    """The process of `torch_timm.py`: a line of JSON is asked, one is answered."""

    def __init__(self, python: str):
        command = [python, str(pathlib.Path(__file__).with_name("torch_timm.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def variant(self, name: str, layout: str, shape: tuple[int, ...], parameters: int) -> Callable[[], float]:
        """The call that runs a model, which must have so many parameters, and returns its seconds."""
        number = self._ask(dict(model=name, layout=layout, shape=shape, threads=THREADS))["parameters"]
        if number != parameters:
            raise RuntimeError(f"{name}: ours has {parameters} parameters and timm's {number}.")
        return lambda: self._ask(dict(run=layout))["seconds"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, question: dict) -> dict:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = next((line for line in self._process.stdout if line.startswith("{")), None)  # libraries print others
        if answer is None:
            raise RuntimeError(f"--peer: torch_timm.py ended at {question}; its error is above.")
        return json.loads(answer)


def claim_of(row: dict) -> Claim:
    """That of a model as it is; the peer does not fold either."""
    name = row["model"]
    return Claim(f"{name}: our time over timm's", row["over_peer"], at_most=LIMITS[name])


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads; the peer inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    sys.exit(main())
