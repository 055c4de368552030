"""How far a reader walks: calls, changes of file and files of a traced forward pass, and the program of a gradient."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from equivit import kernels, models

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = str(ROOT / "equivit")
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # later versions of Python call none


def walked(function) -> list[str]:
    """The files of the functions of ours that a call enters, one after the other."""
    files = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            files.append(code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


# Without kernels, whose bodies are traced too.
@pytest.mark.parametrize(
    ("name", "options", "calls", "changes", "files"),
    [("vit_s16", dict(depth=2), 80, 45, 12), ("octic_vit_s16", dict(family="I8"), 550, 170, 28)],
)
def test_the_walk_through_a_forward_pass(name, options, calls, changes, files):
    model, images = models.abstract(name, **options), jnp.zeros((2, 224, 224, 3))
    with kernels.using("xla"):
        walk = walked(lambda: jax.make_jaxpr(lambda model, images: model(images))(model, images))
    turns = sum(here != there for here, there in zip(walk, [None, *walk], strict=False))
    assert len(walk) <= calls and turns <= changes and len(set(walk)) <= files


def test_the_program_of_a_gradient():
    structure, parameters = nnx.split(models.abstract("vit_s16", depth=2))
    images = jnp.zeros((2, 224, 224, 3))
    with kernels.using("xla"):
        gradient = jax.make_jaxpr(jax.grad(lambda p, x: nnx.merge(structure, p)(x).sum()))(parameters, images)
    assert str(gradient).count("\n") < 600
