"""What all commands share: errors as one line, and changes of single keys.

A command imports what it works with inside the functions that work, so that `--help` answers before JAX is imported.
"""

import argparse
import os
import sys
from collections.abc import Callable

from equivit import errors


def run(main: Callable[[], None], *, debug: bool) -> int:
    """Run a command; errors become one line and exit status 1, or with `debug` a traceback."""
    import jax

    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its exit
        return 1
    except (ValueError, OSError, ArithmeticError, MemoryError, jax.errors.JaxRuntimeError) as error:
        if debug:
            raise
        text = errors.shortened(" ".join(str(error).split())) or "there is not enough memory."
        if jax.distributed.is_initialized() and isinstance(error, jax.errors.JaxRuntimeError):
            text = f"another process of this run has ended; start all of them again to go on.  ({text})"
        print(f"error: {text}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():
            os._exit(1)  # the usual way out waits for processes that may be gone
        return 1
    return 0


def changes(arguments: list[str], parser: argparse.ArgumentParser, prefix: str = "--config.") -> list[str]:
    """The `key=value` of the arguments `--config.key=value` that the parser left.

    Raises:
      ValueError: any other argument; the message gives the nearest flag of the parser.
    """
    for argument in arguments:
        if not argument.startswith(prefix):
            flag, known = argument.partition("=")[0], [name for a in parser._actions for name in a.option_strings]
            raise ValueError(f"unknown argument '{flag}'{errors.nearest(flag, known)} (here also {prefix}KEY=VALUE).")
    return [argument.removeprefix(prefix) for argument in arguments]
