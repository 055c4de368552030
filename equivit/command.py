"""Shared parts of commands: one-line errors, argument types, and overrides of config keys.

Commands import large modules inside functions, so that `--help` does not import JAX.
"""

import argparse
import logging
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from equivit import errors
from equivit.intervals import LARGEST_INT
from equivit.training.run import processes, stopping

CONFIG = "a recipe or a file, such as octic_h:H8, configs/octic_h.py:H8 or my/recipe.py"  # the help of --config


def parser(name: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser of the arguments of a command; a description of several lines keeps its line breaks."""
    lines = argparse.RawDescriptionHelpFormatter if "\n" in (description or "") else argparse.HelpFormatter
    prog = f"equivit {name}" if pathlib.Path(sys.argv[0]).name == "equivit" else f"python -m equivit.{name}"
    return argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=lines, allow_abbrev=False
    )


def run(main: Callable[[], None], *, debug: bool) -> int:
    """Run a command and return its exit status.

    Errors become one line and status 1, or a traceback with `debug`.  A run stopped by a signal returns 128 plus the
    signal's number: 143 for SIGTERM, 130 for Ctrl-C.
    """
    if not debug:
        _silence_threads()
    try:
        import jax

        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python complains at exit
        return 1
    except stopping.Stopped as stopped:
        return stopped.status
    except KeyboardInterrupt:
        if debug:
            raise
        print("error: interrupted by Ctrl-C.", file=sys.stderr, flush=True)
        return _leave(128 + signal.SIGINT)
    except (ValueError, OSError, ArithmeticError, MemoryError, jax.errors.JaxRuntimeError) as error:
        if debug:
            raise
        text = errors.line(str(error)) or "there is not enough memory."
        if jax.distributed.is_initialized():  # a normal exit would wait for the others
            end = processes.end_by_jax if isinstance(error, jax.errors.JaxRuntimeError) else processes.end
            end(text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        return 1
    return 0


def _leave(status):
    """Return the status; with several processes, exit at once, since a normal exit waits for the others."""
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "distributed") and jax.distributed.is_initialized():
        os._exit(status)
    return status


def _silence_threads():
    """Silence errors in threads of Orbax and TensorStore; the command prints them in one line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _is_news(record):
    if not record.exc_info:
        return True
    files = [frame.filename for frame in traceback.extract_tb(record.exc_info[2])]  # asyncio names only a future
    return "orbax" not in f"{record.pathname} {record.getMessage()} {files}"


def _unraisable(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":  # from TensorStore after Orbax has given up
        sys.__unraisablehook__(unraisable)


def say(text: str) -> None:
    """Print a line, in the first process of a run."""
    import jax

    if jax.process_index() == 0:
        print(text, flush=True)


def at_least(smallest: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number of at least `smallest`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if not smallest <= number <= LARGEST_INT:
            raise argparse.ArgumentTypeError(
                f"{errors.shown(text)} must be a whole number from {smallest} to {LARGEST_INT}"
            )
        return number

    return read


def size(text: str) -> tuple[int, int]:
    """The `type` of an argument HEIGHT,WIDTH."""
    try:
        height, width = map(at_least(1), text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{errors.shown(text)} must be HEIGHT,WIDTH, two positive whole numbers such as 224,320"
        ) from None
    return height, width


def check_file(flag: str, path: pathlib.Path) -> None:
    """OSError unless a file can be written at a path; called before its content is computed."""
    if path.is_dir():
        raise IsADirectoryError(f"{flag}={path}: this is a directory; give a file in it, such as {path / path.name}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{flag}={path}: there is no directory {path.parent}; create it first.")
    if not os.access(path.parent if path.is_file() or not path.exists() else path, os.W_OK):  # `files.replacing`
        raise PermissionError(f"{flag}={path}: no permission to write; give another place.")


def add_hints(parser: argparse.ArgumentParser, mlps: Sequence[str]) -> None:
    """Add the flags for properties of --weights that no file determines; `mlps` are the names of activations."""
    parser.add_argument("--num_heads", type=at_least(1), help="with --weights, if no published model has that width")
    parser.add_argument("--image_size", type=size, help="with --weights, HEIGHT,WIDTH of the learned positions")
    parser.add_argument("--mlp", choices=mlps, help="with --weights, the activation, if no name determines it")
    parser.add_argument("--checkpoint_key", help="with --weights, the entry of a checkpoint, such as model_ema")


def changes(arguments: list[str], parser: argparse.ArgumentParser, prefix: str = "--config.") -> list[str]:
    """Return `key=value` for each unparsed argument `--config.key=value`.

    Raises ValueError for any other argument; the message gives the nearest flag of the parser.
    """
    for argument in arguments:
        if not argument.startswith(prefix):
            flag, known = argument.partition("=")[0], [name for a in parser._actions for name in a.option_strings]
            raise ValueError(f"unknown argument '{flag}'{errors.nearest(flag, known)} (here also {prefix}KEY=VALUE).")
    return [argument.removeprefix(prefix) for argument in arguments]
