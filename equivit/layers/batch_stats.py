"""Running statistics that layers record during tracing, and a check that the caller collects them.

A function transformed by JAX works on copies of its modules.  Statistics that a copy records with `train=True` are lost
unless the function returns them; the next call and evaluation would use the old ones.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax import core

_TAKEN = contextvars.ContextVar("taken", default=False)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Declare that the caller collects the statistics that modules record.

        @jax.jit
        @recording()
        def run(model, images):
            return model(images, train=True), logical.take_state(model)

    The training step does this for its objective (`training/state.py`).
    """
    token = _TAKEN.set(True)
    try:
        yield
    finally:
        _TAKEN.reset(token)


def check_taken(name: str, value: jax.Array) -> None:
    """Raise ValueError if `value`, a new running statistic of `name`, is traced and the caller does not collect it."""
    if isinstance(value, core.Tracer) and not _TAKEN.get():
        raise ValueError(
            f"{name}: train=True records running statistics, which a traced function loses; return "
            "logical.take_state(model) from a function under layers.batch_stats.recording(), or leave out train=True "
            "(after model.train(), call model.eval())."
        )
