"""The interpreter of Mosaic GPU kernels."""

import jax
import pytest


@pytest.fixture
def interpreter(monkeypatch):
    """Kernels run in the interpreter, which also raises where two accesses race; few blocks, so that each has work."""
    import jax.experimental.pallas.mosaic_gpu as plgpu  # deferred: Mosaic imports slowly

    from equivit.kernels.d8_gelu import gpu as d8_gelu
    from equivit.kernels.hopper import irreps, norm, norm_gradient, residual, rows
    from equivit.kernels.octic_linear_gelu import gpu as octic_linear_gelu

    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip(f"jax {jax.__version__} has no public GPU interpreter")
    for module in (irreps, d8_gelu, norm, norm_gradient):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 1)
        monkeypatch.setattr(module, "BLOCKS", 1)
    for module in (octic_linear_gelu, residual, rows):
        monkeypatch.setattr(module, "MULTIPROCESSORS", module.CLUSTER)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
