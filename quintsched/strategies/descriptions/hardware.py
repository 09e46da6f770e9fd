"""A cluster by its datasheet: GPUs, the links of a node, the network between nodes.

    {"name": "a100-80gb", "tflops": {"bf16": 312, "fp32": 19.5, "tf32": 156}, "memory_gb": 80, "memory_gbps": 2039,
     "gpus_per_node": 8, "link_gbps": 300, "network_gbps": 25, "pcie_gbps": 32}

All rates of links are in GB/s (10^9 bytes), of one GPU, in one direction. What `calibrate` has measured stands beside
the figures of the datasheet, in `measured`, and is taken in their place.
"""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, model_validator

from quintsched.strategies.descriptions.model import Amount, Description, Figure, Ranks, Size


class Curve(Description):
    """A measured rate by size, interpolated linearly in the logarithm of the size, constant beyond both ends."""

    sizes: tuple[Amount, ...] = Field(min_length=1)
    """Floating-point operations, or bytes; rising, above 0."""
    rates: tuple[Amount, ...]
    """Operations or bytes per second at that size, above 0."""

    @model_validator(mode="after")
    def _sizes_and_rates_agree(self) -> Curve:
        if len(self.sizes) != len(self.rates):
            raise ValueError(f"{len(self.sizes)} sizes, but {len(self.rates)} rates; give one for each size")
        if min(self.sizes + self.rates) < 1e-12 or any(small >= large for small, large in pairwise(self.sizes)):
            raise ValueError("sizes rise from above 0, and rates are above 0")
        return self


class Measured(Description):
    """What `quintsched calibrate` found on this machine; what is missing comes from the datasheet's model."""

    matmul: dict[str, Curve] = Field(default_factory=dict)
    """Matrix products of layers with biases by dtype, backwards among them: operations per second by operations."""
    attention: dict[str, Curve] = Field(default_factory=dict)
    """A causal attention's forward by dtype: operations per second by operations, what the mask hides left out."""
    attention_backward: dict[str, Curve] = Field(default_factory=dict)
    """Its backward: the forward's operations per second of the backward, by the forward's operations."""
    memory: Curve | None = None
    """Elementwise operations: bytes read and written per second, by bytes."""
    optimizer: Curve | None = None
    """A step of AdamW in float32: numbers stepped per second, by numbers."""
    link: Curve | None = None
    """A message between two neighbours: bytes per second by bytes."""
    all_reduce: dict[Ranks, Curve] = Field(default_factory=dict)
    """A sum over that many ranks: bytes of the tensor per second, by bytes."""
    link_work: Curve | None = None
    """On a CPU, what cores lose by a message, where many ranks compute: bytes per second of a core, by bytes."""
    all_reduce_work: dict[Ranks, Curve] = Field(default_factory=dict)
    """The same by a sum over that many ranks: bytes of the tensor per second of a core."""
    kernel_s: Amount | None = None
    """What one operation takes however small it is."""
    cores: Size | None = None
    """On a CPU: how many cores the processes share."""
    sharing: dict[Ranks, Figure] = Field(default_factory=dict)
    """On a CPU: how fast one of that many processes computes while it has a core, relative to one that is alone."""

    @model_validator(mode="after")
    def _work_is_of_known_sums(self) -> Measured:
        for ranks in self.all_reduce_work.keys() - self.all_reduce.keys():
            raise ValueError(f"all_reduce_work is given for {ranks} ranks, but all_reduce is not")
        if self.cores and self.link and self.link_work and not (self.all_reduce_work and self.sharing):
            raise ValueError("with cores and link_work, all_reduce_work and sharing are needed too")
        return self


class Hardware(Description):
    """A kind of GPU and how many of them are connected; see the module."""

    name: str = "hardware"
    tflops: dict[str, Figure] = Field(min_length=1)
    """Peak of matrix products by dtype ("bf16", "fp16", "tf32", "fp32", "fp64"), dense, in 10^12 per second."""
    processors: Size = 108
    """Streaming multiprocessors, or what else makes the tiles of a matrix product side by side."""
    memory_gb: Figure
    """Memory of one GPU in 10^9 bytes."""
    memory_gbps: Figure
    gpus_per_node: Size = 8
    link_gbps: Figure
    """NVLink, or whatever connects the GPUs of a node."""
    network_gbps: Figure
    """Between nodes, for each GPU."""
    pcie_gbps: Figure = 32.0
    """To the host's memory."""
    reserved_gb: Amount = 1.0
    """What the driver, the context and communication libraries take."""
    efficiency: Figure = 1.0
    """The one constant of its own that a GPU other than the A100 may have: it multiplies the fitted efficiency of
    matrix products."""
    attention: Figure = 1.0
    """What share of the A100's efficiency fused attention reaches, where its kernels were written for that GPU."""
    measured: Measured | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    """Where the figures come from."""
