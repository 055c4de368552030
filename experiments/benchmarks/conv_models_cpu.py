"""The eight convolutional models and BiXT on a CPU, as they are and folded, beside torch's under `torch.compile`.

    python -m experiments benchmarks.conv_models_cpu --peer=torch-venv/bin/python  # about half an hour
    python -m experiments benchmarks.conv_models_cpu  # without torch
    python -m experiments benchmarks.conv_models_cpu --peer=... --models=shvit_s1,efficientvit_b0 --runs=5

The peer is a Python that has torch and timm (`torch_peers/timm_models.py` says how to make one); BiXT, which timm does
not have, is plain torch (`torch_peers/bixt.py`).  Forward passes of 8 images of 224 px in float32, every parameter
random, on 2 threads, in turn.  The peer's maps are in torch's usual layout and channels last, and the faster one
counts.  Both models must have the same number of parameters, and both BiXTs the same logits.  The JSON has the load of
the machine before each model.

Claims: as it is, each convolutional model takes at most 1.5 times as long as the peer's, and BiXT at most 1.1 times.
"""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from equivit import logical, pretrained
from equivit.models import zoo
from equivit.models.inference import fold
from experiments import compiled_models, findings, flags, timing
from experiments.benchmarks.processes import Peer
from experiments.findings import Claim

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


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = timing.Budget(options.minutes), []
    for name in options.models:
        if name not in zoo.names():
            print(f"{name}: not in the zoo; skipped", flush=True)
        elif budget.allows(name):
            with budget.trying(name):
                rows.append(measure(name, options))
                print(findings.table(rows[-1:], COLUMNS), flush=True)
    print(f"\nmilliseconds for {options.batch} images of {options.size} px, on {THREADS} threads")
    print(findings.table(rows, COLUMNS))
    facts = dict(batch=options.batch, size=options.size, runs=options.runs, threads=THREADS)
    return findings.finish(options, dict(**facts, rows=rows), list(map(claim_of, rows)), budget)


COLUMNS = dict(model="model", load="load", ours="ours", folded="folded", contiguous="peer")
COLUMNS |= dict(channels_last="channels last", over_peer="ours/peer", folded_over_peer="folded/peer")


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__, runs=20, warmup=3, minutes=40)
    options.add_argument("--peer", help="a Python with torch and timm; without it nothing is compared")
    options.add_argument("--models", type=flags.one_of(list(LIMITS)), default=list(LIMITS))
    options.add_argument("--batch", type=int, default=8, help="images (%(default)s)")
    options.add_argument("--size", type=int, default=224, help="their height and width (%(default)s)")
    return options.parse_args(arguments)


def measure(name: str, options) -> dict:
    """Median milliseconds of each variant of a model.

    Raises RuntimeError when the peer's has another number of parameters or other logits, or gives no answer.
    """
    load = os.getloadavg()[0]
    model = compiled_models.random_model(name, image_size=(options.size, options.size))
    x = np.random.default_rng(1).normal(size=(options.batch, options.size, options.size, 3)).astype(np.float32)
    variants = {"ours": ours(model, x), "folded": ours(jax.jit(fold)(model), x)}
    with contextlib.ExitStack() as stack:
        if options.peer:
            question = dict(model=name, shape=x.shape)
            if name == BIXT:
                question |= with_weights(model, x, pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
            script = "bixt.py" if name == BIXT else "timm_models.py"
            peer = stack.enter_context(contextlib.closing(Peer(options.peer, script, question)))
            parameters = sum(array.size for array in logical.take(model).values())  # without running statistics
            variants |= {layout: peer.variant(layout, THREADS, parameters) for layout in LAYOUTS}
        seconds = timing.medians(timing.in_turn(variants, warmup=options.warmup, runs=options.runs))
    times = {variant: 1e3 * value for variant, value in seconds.items()}
    fastest = min((times[layout] for layout in LAYOUTS if layout in times), default=None)
    row = dict(model=name, load=load, **times, over_peer=timing.ratio(times["ours"], fastest))
    return row | dict(folded_over_peer=timing.ratio(times["folded"], fastest))


def ours(model, x: np.ndarray) -> Callable[[], float]:
    """A call that runs the compiled model and returns its seconds."""
    leaves, structure = jax.tree.flatten(model)  # a module is slow to flatten
    arguments = jax.device_put(leaves), jnp.asarray(x)
    compiled = jax.jit(lambda leaves, x: jax.tree.unflatten(structure, leaves)(x)).lower(*arguments).compile()
    return timing.second_of_two(lambda: compiled(*arguments))


def with_weights(model, x: np.ndarray, folder: pathlib.Path) -> dict:
    """The question to `bixt.py`: its number of heads, and a file with tensors, images and logits."""
    logits = jax.jit(lambda model, x: model(x))(model, x)
    np.savez(folder / "bixt.npz", images=x, logits=np.asarray(logits), **pretrained.state_dict("bixt", model))
    return dict(file=str(folder / "bixt.npz"), heads=model.config.num_heads)


def claim_of(row: dict) -> Claim:
    """The claim about a model as it is; the peer does not fold either."""
    name = row["model"]
    return Claim(f"{name}: our time over the peer's", row["over_peer"], at_most=LIMITS[name])
