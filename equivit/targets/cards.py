"""GPUs that a program can be compiled for, and their rates."""

import dataclasses
import re

from equivit import errors
from equivit.kernels.mesh import HOST

MOST = 64  # cards


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU: how XLA is to see it, and the rates that a floor divides by."""

    name: str  # as JAX calls it
    capability: str  # CUDA's
    memory: int  # bytes
    # Bytes per second that copies reach, reads and writes counted, and operations per second that large matrix
    # products reach, by the type of their factors; float32 is TF32.
    bandwidth: float
    products: dict[str, float]
    rates: str  # where these come from
    # Bytes per second in each direction, nominal: to the cards of its host, and of its share of the network.
    link: float
    network: float
    # Sizes that XLA's choices depend on.
    cores: int
    clock_ghz: float
    peak_bandwidth: float
    cache: int
    shared_memory: int  # bytes of a core

    @property
    def description(self) -> str:
        """The description for `jax.experimental.topologies`: a text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability.split(".")
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory - 1024}
              shared_memory_per_core: {self.shared_memory} core_count: {self.cores} clock_rate_ghz: {self.clock_ghz}
              memory_bandwidth: {int(self.peak_bandwidth)} device_memory_size: {self.memory}
              l2_cache_size: {self.cache} cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """


H200 = Card(
    name="NVIDIA H200",
    capability="9.0",
    memory=141 * 2**30,
    bandwidth=4.3e12,
    products=dict(bf16=790e12, f32=400e12),
    rates="measured",
    link=450e9,
    network=50e9,
    cores=132,
    clock_ghz=1.98,
    peak_bandwidth=4.8e12,
    cache=50 * 2**20,
    shared_memory=228 * 2**10,
)
H100 = dataclasses.replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    memory=80 * 2**30,
    bandwidth=2.8e12,
    products=dict(bf16=700e12, f32=355e12),
    rates="measured (float32 as a share of its peak)",
    peak_bandwidth=3.35e12,
)
A100 = Card(
    name="NVIDIA A100-SXM4-40GB",
    capability="8.0",
    memory=40 * 2**30,
    bandwidth=1.35e12,
    products=dict(bf16=235e12, f32=117e12),
    rates="not measured: 87 % of the peak bandwidth and 75 % of the peak of products, as on H100 and H200",
    link=300e9,
    network=25e9,
    cores=108,
    clock_ghz=1.41,
    peak_bandwidth=1.555e12,
    cache=40 * 2**20,
    shared_memory=164 * 2**10,
)
CARDS = dict(h200=H200, h100=H100, a100=A100)


@dataclasses.dataclass(frozen=True)
class Target:
    """Cards of one kind, in hosts of 8."""

    card: Card
    count: int

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return -(-self.count // HOST)


def parse(text: str) -> Target:
    """The target that a text such as "h200x8" names.

    Raises ValueError for an unknown card, or a number of cards that does not fill its hosts.
    """
    name, _, count = text.partition("x")
    if name not in CARDS:
        raise ValueError(f"target={text!r}: {name!r} is not one of {', '.join(CARDS)}{errors.nearest(name, CARDS)}.")
    number = int(count) if re.fullmatch(r"[0-9]{1,9}", count) else 0 if count or "x" in text else 1
    if not 1 <= number <= MOST or (number > HOST and number % HOST):
        nearest = min(max(round(number / HOST), 1) * HOST, MOST) if number else 1
        raise ValueError(
            f"target={text!r}: the number of cards must be 1 to {HOST}, or a multiple of {HOST} up to {MOST} (whole "
            f"hosts); the nearest is {name}x{nearest}."
        )
    return Target(CARDS[name], number)
