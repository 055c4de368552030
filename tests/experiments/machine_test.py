"""Memory of compiled programs."""

import jax
import jax.numpy as jnp

from experiments import machine
from experiments.machine import Memory


def test_memory_of_programs_in_turn():
    programs = [Memory(held=30, peak=50), Memory(held=20, peak=60), None]
    assert machine.fit(programs, 95)  # 30 + 20 held, and 40 more during the second: 90, of 95 a twentieth is free
    assert not machine.fit(programs, 94)
    assert machine.fit(programs, None)


def test_memory_is_that_of_arguments_results_and_temporaries():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    memory = machine.memory(jax.jit(lambda x, y: x + y).lower(x, x).compile())
    assert memory == Memory(held=8000, peak=12000)
    given = machine.memory(jax.jit(lambda x, y: x + y, donate_argnums=0).lower(x, x).compile())
    assert given == Memory(held=8000, peak=8000)
