"""Foreign models: files of named tensors, whose names, shapes, types and values tell the configuration."""

import pathlib
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from hypothesis import strategies as st

from equivit import logical, pretrained
from equivit.layers.rngs import Keys
from equivit.models import zoo
from equivit.pretrained import mapping
from tests.fuzz.attack import Files, Reader, made_in_child

FILE = "w.safetensors"
SMALL = dict(depth=2, width=16, num_heads=2, image_size=(32, 32), num_classes=3)
MODELS = {"timm": ("vit_ti16", SMALL), "octic_vits": ("octic_vit_ti16", SMALL), "flip": ("flip_vit_ti16", SMALL)}
State = dict[str, np.ndarray]


def _states() -> dict[str, State]:
    """The tensors of each model, by source."""
    states = {}
    for source, (name, fields) in MODELS.items():
        config = zoo.configuration(name, **fields)
        abstract = jax.eval_shape(lambda config=config: config.build(Keys(0)))
        tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in mapping.shapes(config).items()}
        states[source] = pretrained.state_dict(source, logical.from_logical(abstract, tensors, pretrained.STORED))
    return {source: {name: np.asarray(tensor) for name, tensor in state.items()} for source, state in states.items()}


@st.composite
def damaged(draw, state: State) -> Files:
    """The file of a state dict of which tensors have other names, shapes, types or values, or are left out."""
    state = dict(state)
    for _ in range(draw(st.integers(1, 3))):
        name, kind = (
            draw(st.sampled_from(sorted(state))),
            draw(st.sampled_from(("name", "shape", "type", "value", "drop", "like"))),
        )
        tensor = state[name]
        if kind == "name":
            parts = name.split(".")
            parts[draw(st.integers(0, len(parts) - 1))] = draw(
                st.sampled_from(("0", "1", "7", "-1", "01", "10000000000", "", "weight", "x", "\n"))
            )
            state[".".join(parts)] = state.pop(name)
        elif kind == "shape":
            shape = list(tensor.shape) or [1]
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from((0, 1, 2, 3, 5, 17, 64)))
            state[name] = np.zeros(
                draw(st.sampled_from((tuple(shape), tuple(shape[1:]), (1, *shape), ()))), tensor.dtype
            )
        elif kind == "type":
            state[name] = np.zeros(
                tensor.shape,
                draw(st.sampled_from((np.int64, np.int8, np.bool_, np.float16, np.float64, np.complex64, np.uint64))),
            )
        elif kind == "value" and tensor.size and tensor.dtype.kind == "f":
            state[name] = np.full_like(tensor, draw(st.sampled_from((np.nan, np.inf, -np.inf, 3e38, 0.0))))
        elif kind == "drop" and len(state) > 1:
            del state[name]
        else:
            state[name] = state[draw(st.sampled_from(sorted(state)))]
    return {FILE: safetensors.numpy.save(state)}


def _reader(source: str, state: State) -> Reader:
    def read(folder: pathlib.Path) -> Any:
        return pretrained.load(source, folder / FILE, num_heads=2, family="H2" if source == "flip" else None)

    return Reader(f"pretrained: {source}", {FILE: safetensors.numpy.save(state)}, damaged(state), read)


READERS = tuple(_reader(source, state) for source, state in made_in_child(_states).items())
