"""Programs timed in processes of their own: threads of one library that spin while they wait slow another one down."""

import contextlib
import importlib
import json
import multiprocessing
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np

from experiments import timing

TOLERANCE = 1e-5  # of the largest logit, where ours and the peer's are the same function
PEERS = pathlib.Path(__file__).with_name("torch_peers")


@contextlib.contextmanager
def started(name: str, make: Callable[..., tuple[Any, Callable]], *arguments) -> Iterator[tuple[Any, Callable]]:
    """Run `make(*arguments)`, which returns a result and the call to time, in a process that ends with the context.

    Yields the result, and a call that has the process run twice and returns the seconds of the second run.  `make` is
    a function of a module; messages have the `name`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is noticed here

    def answer(question: str = "") -> Any:
        try:
            if question:
                ours.send(question)
            return ours.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"{name}: its process has ended; its error is above.") from None

    with ours:
        yield answer(), lambda: answer("run")
    process.join()


def _serve(questions: Connection, make: Callable, arguments: tuple) -> None:
    result, call = make(*arguments)
    run = timing.second_of_two(call)
    questions.send(result)
    with contextlib.suppress(EOFError):
        while questions.recv():
            questions.send(run())


def torch_peer(name: str) -> ModuleType:
    """A module of torch_peers/ for a process of this Python; ImportError, with the remedy, where torch is missing."""
    try:
        return importlib.import_module(f"experiments.benchmarks.torch_peers.{name}")
    except ImportError as error:
        raise ImportError(
            "the peer of this experiment needs torch, which is no requirement of equivit: in a virtual environment of "
            "its own, `pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu`."
        ) from error


def milliseconds(variants: Mapping[str, Callable[[], float]], options) -> dict[str, float]:
    """Median milliseconds of each variant, which returns its own seconds, by the flags of `flags.timing_parser`."""
    times = timing.medians(timing.in_turn(variants, warmup=options.warmup, runs=options.runs))
    return {name: 1e3 * seconds for name, seconds in times.items()}


def beside_torch(pairs: Mapping[str, tuple], tolerance: float, options) -> dict[str, float | None]:
    """Milliseconds of each operation, of torch's ("torch_<name>"), and their ratio ("<name>_over_torch").

    Args:
      pairs: by name, our result, our call, and None or torch's side: a function for `started` and its arguments.
      tolerance: largest deviation of the results, of the largest entry; RuntimeError where it is exceeded.
    """
    variants = {}
    with contextlib.ExitStack() as stack:
        for name, (result, call, peer) in pairs.items():
            variants[name] = timing.second_of_two(call)
            if peer:
                expected, variants[f"torch_{name}"] = stack.enter_context(started(f"torch, {name}", *peer))
                error = np.abs(result - expected).max() / np.abs(expected).max()
                if not error < tolerance:
                    raise RuntimeError(f"{name}: ours and torch's differ by {error:.1e}.")
        times = milliseconds(variants, options)
    return times | {f"{name}_over_torch": timing.ratio(times[name], times.get(f"torch_{name}")) for name in pairs}


class Peer:
    """A script of torch_peers/, run by the interpreter `python` with torch: it answers a line of JSON with one.

    `question` describes the model, and has its name.
    """

    def __init__(self, python: str, script: str, question: dict):
        self._question, self._script = question, script
        command = [python, str(PEERS / script)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def variant(self, layout: str, threads: int, parameters: int | None = None) -> Callable[[], float]:
        """The call that runs the model, which must have `parameters` parameters if given, and returns its seconds."""
        name, answer = self._question["model"], self._ask(dict(layout=layout, threads=threads, **self._question))
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
