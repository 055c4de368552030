"""The eight convolutional models and BiXT on a CPU, as they are and folded, beside torch's under `torch.compile`.

    python -m experiments benchmarks.conv_models_cpu --peer=torch-venv/bin/python  # about half an hour
    python -m experiments benchmarks.conv_models_cpu  # without torch

The peer is a Python that has torch and timm (`torch_peers/timm_models.py` says how to make one); BiXT, which timm does
not have, is plain torch (`torch_peers/bixt.py`).  Forward passes of 8 images of 224 px in float32, every parameter
random, on 2 threads, in turn.  The peer's maps are in torch's usual layout and channels last, and the faster one
counts.  Both models must have the same number of parameters, and both BiXTs the same logits.  The JSON has the load of
the machine before each model.  Claims: each convolutional model as it is takes at most 1.5 times the time of the
peer, BiXT at most 1.1 times.
"""

import contextlib
import functools
import os
import pathlib
import tempfile

import jax
import numpy as np

from equivit import logical, pretrained
from equivit.models.inference import fold
from experiments import compiled_models, findings, flags, timing
from experiments.benchmarks import processes
from experiments.findings import Claim

CONVOLUTIONAL = ("efficientvit_b0", "efficientvit_b1", "shvit_s1", "shvit_s2", "shvit_s3", "mobilenetv4_conv_small")
CONVOLUTIONAL += ("mobilenetv4_conv_medium", "mobilenetv4_hybrid_medium")
BIXT = "bixt_ti_p16"
THREADS = 2
LIMITS = dict.fromkeys(CONVOLUTIONAL, 1.5) | {BIXT: 1.1}  # times the peer's time
LAYOUTS = ("contiguous", "channels_last")  # of the peer's maps
COLUMNS = dict(model="model", load="load", ours="ours", folded="folded", contiguous="peer")
COLUMNS |= dict(channels_last="channels last", over_peer="ours/peer", folded_over_peer="folded/peer")


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=15, warmup=3, minutes=40)
    parser.add_argument("--peer", help="a Python with torch and timm; without it nothing is compared")
    parser.add_argument("--models", type=flags.one_of(list(LIMITS)), default=list(LIMITS))
    parser.add_argument("--batch", type=int, default=8, help="images (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="their height and width (%(default)s)")
    options = parser.parse_args(arguments)
    settings = dict(batch=options.batch, size=options.size, runs=options.runs, threads=THREADS)
    settings |= dict(peer=options.peer is not None)
    entry = findings.Entry(options, settings, timing.Budget(options.minutes))
    entry.keep(("model",), [(name,) for name in options.models])
    rows = entry.measured(functools.partial(measure, options=options), COLUMNS)
    print(f"\nmilliseconds for {options.batch} images of {options.size} px, on {THREADS} threads")
    print(findings.table(rows, COLUMNS))
    return entry.finish(list(map(claim_of, rows)))


def measure(name: str, options) -> dict:
    """Median milliseconds of each variant of a model.

    Raises RuntimeError when the peer's has another number of parameters or other logits, or gives no answer.
    """
    load = os.getloadavg()[0]
    model = compiled_models.random_model(name, image_size=(options.size, options.size))
    x = np.random.default_rng(1).normal(size=(options.batch, options.size, options.size, 3)).astype(np.float32)
    models = dict(ours=model, folded=jax.jit(fold)(model))
    calls = {name: compiled_models.call(lambda model, x: model(x), model, x) for name, model in models.items()}
    variants = {name: timing.second_of_two(call) for name, call in calls.items()}
    with contextlib.ExitStack() as stack:
        if options.peer:
            question = dict(model=name, shape=x.shape)
            if name == BIXT:
                question |= with_weights(model, x, pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
            script = "bixt.py" if name == BIXT else "timm_models.py"
            peer = stack.enter_context(contextlib.closing(processes.Peer(options.peer, script, question)))
            parameters = sum(array.size for array in logical.take(model).values())  # without running statistics
            variants |= {layout: peer.variant(layout, THREADS, parameters) for layout in LAYOUTS}
        times = processes.milliseconds(variants, options)
    fastest = min((times[layout] for layout in LAYOUTS if layout in times), default=None)
    row = dict(model=name, load=load, **times, over_peer=timing.ratio(times["ours"], fastest))
    return row | dict(folded_over_peer=timing.ratio(times["folded"], fastest))


def with_weights(model, x: np.ndarray, folder: pathlib.Path) -> dict:
    """The question to `bixt.py`: its number of heads, and a file with tensors, images and logits."""
    logits = jax.jit(lambda model, x: model(x))(model, x)
    np.savez(folder / "bixt.npz", images=x, logits=np.asarray(logits), **pretrained.state_dict("bixt", model))
    return dict(file=str(folder / "bixt.npz"), heads=model.config.num_heads)


def claim_of(row: dict) -> Claim:
    """The claim about a model as it is; the peer does not fold either."""
    name = row["model"]
    return Claim(f"{name}: our time over the peer's", row["over_peer"], at_most=LIMITS[name])
