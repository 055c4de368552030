"""Running statistics that layers record while a function is traced, and who takes them.

A function that JAX transforms gets copies of the modules that it is called with.  What a copy records with `train=True`
is lost unless the function returns it; the next call begins with the old statistics, and evaluation uses them.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax import core

_TAKEN = contextvars.ContextVar("taken", default=False)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within it, the caller takes the statistics that modules record.

        @jax.jit
        @recording()
        def run(model, images):
            return model(images, train=True), logical.take_state(model)

    A step of training does that for its objective (`training/state.py`).
    """
    token = _TAKEN.set(True)
    try:
        yield
    finally:
        _TAKEN.reset(token)


def check_taken(name: str, value: jax.Array) -> None:
    """ValueError if `value`, a new running statistic of `name`, is of a traced function and nobody takes it."""
    if isinstance(value, core.Tracer) and not _TAKEN.get():
        raise ValueError(
            f"{name}: train=True records running statistics, which a traced function loses; return "
            "logical.take_state(model) from a function under layers.batch_stats.recording(), or leave out train=True."
        )
