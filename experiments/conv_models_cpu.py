"""The eight convolutional models and BiXT on a CPU, as they are and folded, beside torch's under `torch.compile`.

    python experiments/conv_models_cpu.py --peer=torch-venv/bin/python    # about half an hour
    python experiments/conv_models_cpu.py                                 # without torch
    python experiments/conv_models_cpu.py --peer=... --models=shvit_s1,efficientvit_b0 --runs=5

The peer is a Python that has torch and timm (`torch_timm.py` says how to make one); equivit needs neither.  BiXT,
which timm does not have, is written in plain torch (`torch_bixt.py`).

Forward passes of 8 images of 224 px in float32, every parameter random, on 2 threads: after a warm-up, medians, the
variants in turn within each round.  The peer's run in a process of their own, with a pause between turns: threads of
one library that spin while they wait for work would slow the other down.  They run in torch's usual layout of maps and
with the channels last, and count by the faster one.  Both models must have the same number of parameters; both BiXTs
have the same weights, and their logits are compared before anything is timed.  The load of the machine before each
model is noted: others' work falsifies the figures.  Not in the paper.

Claims: as it is, each convolutional model takes at most 1.5 times as long as the peer's, and BiXT at most 1.1 times.
Exits 1 when one fails.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from equivit import logical, pretrained
from equivit.models import zoo
from equivit.models.inference import fold
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
BIXT = "bixt_ti_p16"
LIMITS = dict.fromkeys(CONVOLUTIONAL, 1.5) | {BIXT: 1.1}  # times the peer's time
LAYOUTS = ("contiguous", "channels_last")  # of the peer's maps
TOLERANCE = 1e-5  # of the largest logit, where ours and the peer's are the same function


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
    contiguous="peer",
    channels_last="channels last",
    over_peer="ours/peer",
    folded_over_peer="folded/peer",
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

    Raises RuntimeError when the peer's has another number of parameters or other logits, or gives no answer.
    """
    load = os.getloadavg()[0]
    model = programs.random_model(name, image_size=(options.size, options.size))
    x = np.random.default_rng(1).normal(size=(options.batch, options.size, options.size, 3)).astype(np.float32)
    variants = {"ours": ours(model, x), "folded": ours(jax.jit(fold)(model), x)}
    with contextlib.ExitStack() as stack:
        if options.peer:
            question = dict(model=name, shape=x.shape)
            if name == BIXT:
                question |= with_weights(model, x, pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
            peer = stack.enter_context(contextlib.closing(Peer(options.peer, question)))
            parameters = sum(array.size for array in logical.take(model).values())  # without running statistics
            variants |= {layout: peer.variant(layout, parameters) for layout in LAYOUTS}
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


def with_weights(model, x: np.ndarray, folder: pathlib.Path) -> dict:
    """The question to `torch_bixt.py` about a model: a file with tensors, images and logits; and its heads."""
    logits = jax.jit(lambda model, x: model(x))(model, x)
    np.savez(folder / "bixt.npz", images=x, logits=np.asarray(logits), **pretrained.state_dict("bixt", model))
    return dict(file=str(folder / "bixt.npz"), heads=model.config.num_heads)


class Peer:
    """The process of `torch_timm.py` or `torch_bixt.py`: a line of JSON is asked, one is answered.

    Args:
      question: what the peer makes its model of, its name among it.
    """

    def __init__(self, python: str, question: dict):
        self._question, self._script = question, "torch_bixt.py" if question["model"] == BIXT else "torch_timm.py"
        command = [python, str(pathlib.Path(__file__).with_name(self._script))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def variant(self, layout: str, parameters: int | None = None) -> Callable[[], float]:
        """The call that runs the model, which must have `parameters` parameters if given, and returns its seconds."""
        name, answer = self._question["model"], self._ask(dict(layout=layout, threads=THREADS, **self._question))
        if parameters not in (None, answer["parameters"]):
            raise RuntimeError(f"{name}: ours has {parameters} parameters and the peer's {answer['parameters']}.")
        if answer["error"] is not None and not answer["error"] < TOLERANCE:
            raise RuntimeError(f"{name}: the peer's logits differ from ours by {answer['error']:.1e} of the largest.")
        return lambda: self._ask(dict(run=layout))["seconds"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, question: dict) -> dict:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = next((line for line in self._process.stdout if line.startswith("{")), None)  # libraries print others
        if answer is None:
            raise RuntimeError(f"--peer: {self._script} ended at {question}; its error is above.")
        return json.loads(answer)


def claim_of(row: dict) -> Claim:
    """The claim about a model as it is; the peer does not fold either."""
    name = row["model"]
    return Claim(f"{name}: our time over the peer's", row["over_peer"], at_most=LIMITS[name])


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads; the peer inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    sys.exit(main())
