"""The GPU that a program is lowered for: this machine's, or one that is described and need not be present."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Gpu(NamedTuple):
    """Properties that the choice of kernels depends on."""

    capability: str  # CUDA's, such as "9.0" for Hopper
    cudnn: int  # version of cuDNN, such as 91000 for 9.10


_DESCRIBED = jax.make_user_context(None)  # part of the keys of JAX's caches


@contextlib.contextmanager
def lowering_for(gpu: Gpu) -> Iterator[None]:
    """A context in which programs are traced and lowered for `gpu`, whatever this machine has."""
    with _DESCRIBED(gpu), _answering_for(gpu):
        yield


def described() -> Gpu | None:
    """The GPU of `lowering_for`; None outside of it."""
    return _DESCRIBED.value


@contextlib.contextmanager
def _answering_for(gpu):
    """Answer for `gpu` when JAX traces attention: it asks the machine's GPU, and has no public way to change that."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def reaches(capability):
        return _numbers(gpu.capability) >= _numbers(capability)

    def is_exactly(capability):
        return gpu.capability == capability

    answers = dict(check_cudnn_version=lambda: gpu.cudnn, check_compute_capability=reaches)
    answers |= dict(is_cuda_compute_capability_equal=is_exactly)
    own = {name: getattr(cudnn, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(cudnn, name, answer)
        yield
    finally:
        for name, answer in own.items():
            setattr(cudnn, name, answer)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
