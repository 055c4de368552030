"""Time exported models: ONNX files alternately on one thread, as in A.2.2 of "Drop-in Depthwise Convolution".

    python -m equivit.profile before.onnx after.onnx --out=profile.json
    python -m equivit.profile before.onnx after.onnx --provider=cuda  # or tensorrt; --tf32

ONNX Runtime uses one thread on one core, and a random input of the file's shape, one image of a dynamic batch.  Every
round calls each file once, in alternating order, so that clock changes and other programs affect all files alike.
Times are medians over rounds; ratios are to the first file.  On a GPU, input and output stay there, and factors of
float32 products are not rounded to TF32 unless --tf32 allows it.  With --realtime the process has real-time priority
(FIFO), as in the paper: nothing else runs on its core.  This needs permission, and a machine without other users.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from equivit import command, files

PRIORITY = 99  # of FIFO, as in the paper
PROVIDERS = ("cpu", "cuda", "tensorrt")  # of onnx_files.PROVIDERS
TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    return command.run(functools.partial(_run, options), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("profile", __doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="ONNX files; ratios are to the first")
    parser.add_argument("--provider", choices=PROVIDERS, default="cpu", help="execution provider (%(default)s)")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in float32 products on a GPU")
    parser.add_argument("--runs", type=command.at_least(1), default=100, help="timed rounds (%(default)s)")
    parser.add_argument("--warmup", type=command.at_least(0), default=10, help="untimed first rounds (%(default)s)")
    parser.add_argument("--realtime", action="store_true", help="use real-time priority on the core")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for all results")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace) -> None:
    for path in options.files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file; python -m equivit.export writes one.")
    if options.out is not None:
        command.check_file("--out", options.out)
        if options.out.exists() and any(path.samefile(options.out) for path in options.files):
            other = options.out.with_suffix(".json")
            raise ValueError(f"--out={options.out}: this is one of the files to time; give another, such as {other}.")
    names = ("provider", "tf32", "runs", "warmup", "realtime")
    report = profile(options.files, **{name: getattr(options, name) for name in names}, say=print)
    width = max(len(row["file"]) for row in report["files"])
    for row in report["files"]:
        print(
            f"{row['file']:{width}}  {row['milliseconds']:9.3f} ms  {row['ratio']:6.3f}  {row['bytes'] / 1e6:8.2f} MB"
        )
    if options.out is not None:
        files.write_text(options.out, json.dumps(report, indent=1) + "\n")
        print(f"Done: {options.out}")


def profile(
    files: Sequence[str | os.PathLike],
    *,
    provider: str = "cpu",
    tf32: bool = False,
    runs: int = 100,
    warmup: int = 10,
    realtime: bool = False,
    say: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Time each file in milliseconds, and record the conditions.

    Args:
      provider: one of PROVIDERS.
      tf32: allow TF32 in float32 products, on a GPU.
      runs: timed rounds, after `warmup` untimed ones.
      realtime: use real-time priority (`alone`).
      say: prints a line before the work.

    Returns the content of the JSON: `files`, each with `file`, `milliseconds` (the median), `quartiles`, `ratio` and
    `bytes`; and the conditions.

    Raises:
      ValueError: ONNX Runtime is missing, lacks the provider here, or rejects a file; or TF32 on a CPU.
      PermissionError: the system does not allow real-time priority.
    """
    from equivit import onnx_files

    if tf32 and provider == "cpu":
        raise ValueError("--tf32: a CPU has no such products; leave it out, or take --provider=cuda.")
    precision = "" if provider == "cpu" else f" {'with' if tf32 else 'without'} TF32"
    with alone(realtime=realtime) as conditions:
        sessions = {i: onnx_files.session(path, provider=provider, tf32=tf32) for i, path in enumerate(files)}
        say(f"Timing {len(files)} file(s), {runs} rounds after {warmup}, on {provider}{precision}; {conditions}.")
        calls = {i: bound(session, provider) for i, session in sessions.items()}
        seconds = interleaved(calls, runs=runs, warmup=warmup)
    rows: list[dict[str, Any]] = []
    for path, times in zip(files, seconds.values(), strict=True):
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        row = dict(file=str(path), milliseconds=1e3 * statistics.median(times), quartiles=[1e3 * q for q in quartiles])
        rows.append({**row, "bytes": pathlib.Path(path).stat().st_size})
        rows[-1]["ratio"] = row["milliseconds"] / rows[0]["milliseconds"]
    runtime = f"onnxruntime {onnx_files.library('onnxruntime').__version__}"
    machine = dict(machine=f"{platform.machine()}, {os.cpu_count()} cores", runtime=runtime, provider=provider)
    machine |= {} if provider == "cpu" else dict(tf32=tf32)
    return dict(files=rows, runs=runs, warmup=warmup, conditions=conditions, realtime=realtime, **machine)


def interleaved(calls: Mapping[Any, Callable[[], Any]], *, runs: int, warmup: int) -> dict[Any, list[float]]:
    """Time calls in seconds; each round calls every function once, in alternating order."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + runs):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            calls[name]()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def bound(session: Any, provider: str = "cpu") -> Callable[[], None]:
    """Bind a session to random inputs and return its call; inputs and outputs stay on the provider's device."""
    import numpy as np

    from equivit import onnx_files

    runtime, draw, binding = onnx_files.library("onnxruntime"), np.random.default_rng(0), session.io_binding()
    device = "cpu" if provider == "cpu" else "cuda"
    for image in session.get_inputs():
        if image.type not in TYPES:
            raise ValueError(f"input {image.name!r} is {image.type}; images are {' or '.join(TYPES)}.")
        shape = [size if isinstance(size, int) else 1 for size in image.shape]
        values = draw.normal(size=shape).astype(TYPES[image.type])
        binding.bind_ortvalue_input(image.name, runtime.OrtValue.ortvalue_from_numpy(values, device, 0))
    for wanted in session.get_outputs():
        binding.bind_output(wanted.name, device)

    def call():
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return call


@contextlib.contextmanager
def alone(*, realtime: bool = False) -> Iterator[str]:
    """Keep the process on one core; yield the conditions in words.

    With `realtime` nothing else runs on the core: the process also has real-time priority (FIFO).

    Raises:
      ValueError: the system has no real-time priority.
      PermissionError: this process may not use it.
    """
    if not hasattr(os, "sched_setaffinity"):
        if realtime:
            raise ValueError(f"--realtime: {platform.system()} has no such priority; leave it out.")
        yield f"one thread; {platform.system()} pins no process to a core"
        return
    cores, policy, parameters = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    core = max(cores)  # the first core handles most interrupts
    os.sched_setaffinity(0, {core})
    try:
        if realtime:
            _take_real_time()
        priority = f"real-time priority {PRIORITY} (FIFO)" if realtime else "ordinary priority"
        yield f"one thread on core {core}, at {priority}"
    finally:
        if realtime:
            os.sched_setscheduler(0, policy, parameters)
        os.sched_setaffinity(0, cores)


def _take_real_time() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError as error:
        raise PermissionError(
            f"--realtime: this process may not use real-time priority ({error.strerror}); leave it out, or run as a "
            "user with this permission."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
