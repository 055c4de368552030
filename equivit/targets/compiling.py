"""Compile for GPUs that are not present."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from equivit.kernels import gpus
from equivit.kernels.mesh import HOST
from equivit.targets.cards import Target

INSTALL = 'pip install "jax[cuda13-local]"'
CUDNN = 91000  # as in the description of a card
# Without a card nothing can be tried, so that products stay with cuBLAS.
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def devices(target: Target) -> list[Any]:
    """The cards of a target, for a mesh that programs are compiled for and never run on.

    Raises ValueError if the CUDA plugin of JAX is not installed.
    """
    from jax.experimental import topologies

    shape = f"1x{target.hosts}x{min(target.count, HOST)}"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target.card.description, topology=shape
        )
    except NotImplementedError as error:
        raise ValueError(
            f"targets: the CUDA plugin of JAX {jax.__version__} is missing; {INSTALL} installs it, without the CUDA "
            "libraries (without a GPU it needs JAX_PLATFORMS=cpu)."
        ) from error
    return list(described.devices)


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """A context in which programs are traced and lowered for the cards of a target."""
    with gpus.lowering_for(gpus.Gpu(target.card.capability, CUDNN)):
        yield


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The program of a function lowered for a target."""
    return lowered.compile(compiler_options=OPTIONS)
