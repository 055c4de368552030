"""Running a script of experiments/ from end to end."""

import json

import numpy as np

from experiments import flags

ONCE = ["--runs=1", "--warmup=1"]


def status(script, arguments):
    """The exit status of a script; errors about its input are one line."""
    return flags.run(script.main, arguments)


def run(script, tmp_path, *arguments):
    """The exit status and the JSON of a script that was run with these arguments."""
    output = tmp_path / "results.json"
    ended = script.main([f"--output={output}", *arguments])
    written = json.loads(output.read_text())["main"]
    assert {"device", "versions", "commit", "claims", "left_out", "failed"} <= set(written)
    assert written["failed"] == {} and written["left_out"] == []
    return ended, written


def made_up_images(directory, *, train: int, test: int, side: int, classes: int) -> str:
    """The source of an npz file of random images with labels in turn."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", train), ("test", test)):
        arrays[f"{split}_image"] = rng.integers(0, 256, (n, side, side, 3), np.uint8)
        arrays[f"{split}_label"] = np.arange(n) % classes
    np.savez(directory / "made_up.npz", **arrays, classes=np.array(list("0123456789"[:classes])))
    return f"npz:{directory}/made_up.npz"
