"""Hardware of a cluster by its datasheet: GPUs, links within a node, network between nodes.

    {"name": "a100-80gb", "tflops": {"bf16": 312, "fp32": 19.5, "tf32": 156}, "memory_gb": 80, "memory_gbps": 2039,
     "gpus_per_node": 8, "link_gbps": 300, "network_gbps": 25, "pcie_gbps": 32}

All link rates are in GB/s (10^9 bytes), per GPU and direction. Rates measured by `calibrate` are stored beside the
figures of the datasheet, in `measured`, and take precedence.
"""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, model_validator

from quintsched.strategies.descriptions.model import Amount, Description, Figure, RankCount, Size


class Curve(Description):
    """Measured rate by size: interpolated linearly in the logarithm of the size, constant beyond both ends."""

    sizes: tuple[Amount, ...] = Field(min_length=1)
    """Floating-point operations, or bytes; ascending, above 0."""
    rates: tuple[Amount, ...]
    """Operations or bytes per second at that size, above 0."""

    @model_validator(mode="after")
    def _sizes_and_rates_agree(self) -> Curve:
        if len(self.sizes) != len(self.rates):
            raise ValueError(f"{len(self.sizes)} sizes, but {len(self.rates)} rates; give one for each size")
        if min(self.sizes + self.rates) < 1e-12 or any(small >= large for small, large in pairwise(self.sizes)):
            raise ValueError("sizes rise from above 0, and rates are above 0")
        return self


class MeasuredRates(Description):
    """Rates measured by `quintsched calibrate`; missing ones come from the datasheet's model."""

    matmul: dict[str, Curve] = Field(default_factory=dict)
    """Matrix products of linear layers with bias, by dtype, forward and backward: FLOP/s by FLOP."""
    products: tuple[tuple[Figure, Figure, Figure, Figure, Amount], ...] = ()
    """Matrix products by shape: how many at once; m, n, k of m x k by k x n; FLOP/s. Others are as the nearest."""
    attention: dict[str, Curve] = Field(default_factory=dict)
    """Forward of causal attention, by dtype: FLOP/s by FLOP, without masked operations."""
    attention_backward: dict[str, Curve] = Field(default_factory=dict)
    """Backward of causal attention: the forward's FLOP per second of the backward, by the forward's FLOP."""
    memory: Curve | None = None
    """Elementwise operations: bytes read and written per second, by bytes."""
    passes: dict[str, Figure] = Field(default_factory=dict)
    """Rates of operators bound by memory, by name ("cross-entropy", "permute"), relative to `memory`."""
    optimizer: Curve | None = None
    """Step of AdamW in float32: elements per second, by elements."""
    link: Curve | None = None
    """Message between two neighbours: bytes per second, by bytes."""
    all_reduce: dict[RankCount, Curve] = Field(default_factory=dict)
    """All-reduce over that many ranks: bytes of the tensor per second, by bytes."""
    all_to_all: dict[RankCount, Curve] = Field(default_factory=dict)
    """All-to-all among that many ranks of a node: bytes that a rank sends in all per second, by bytes."""
    all_reduce_apart: dict[RankCount, Curve] = Field(default_factory=dict)
    """All-reduce over that many ranks of a node that are no neighbours, where their groups share links; else as
    `all_reduce`."""
    link_work: Curve | None = None
    """On a CPU: core time that a message costs if many ranks compute: bytes per second of a core, by bytes."""
    all_reduce_work: dict[RankCount, Curve] = Field(default_factory=dict)
    """The same for an all-reduce over that many ranks: bytes of the tensor per second of a core."""
    kept: dict[RankCount, Figure] = Field(default_factory=dict)
    """Activations that a layer keeps, relative to those predicted, by tp; others are as the nearest."""
    kernel_s: Amount | None = None
    """Seconds of one operation of negligible size (launch overhead); 0 for steps captured as graphs, or compiled."""
    cores: Size | None = None
    """On a CPU: number of cores that the processes share."""
    sharing: dict[RankCount, Figure] = Field(default_factory=dict)
    """On a CPU: speed of one of that many processes while it has a core, relative to a single process."""

    @model_validator(mode="after")
    def _work_is_of_known_sums(self) -> MeasuredRates:
        for ranks in self.all_reduce_work.keys() - self.all_reduce.keys():
            raise ValueError(f"all_reduce_work is given for {ranks} ranks, but all_reduce is not")
        if self.cores and self.link and self.link_work and not (self.all_reduce_work and self.sharing):
            raise ValueError("with cores and link_work, all_reduce_work and sharing are needed too")
        return self


class Constants(Description):
    """Efficiency factors that are in no datasheet: six fitted numbers, the same for all hardware."""

    product: Figure = 0.8377
    """Fraction of the peak that a large matrix product reaches."""
    half: Figure = 249.0
    """Inner dimension k at which a matrix product runs at half that rate."""
    memory: Figure = 0.8033
    """Fraction of the memory bandwidth that a large pass reaches."""
    link: Figure = 0.7709
    """Fraction of the link rate inside a node that a large collective reaches."""
    network: Figure = 0.2626
    """Fraction of the network rate between nodes."""
    contention: Figure = 0.2389
    """Slowdown of computation: extra seconds for each second that a collective overlaps with it."""


class Hardware(Description):
    """GPU type with its memory and links; see the module."""

    name: str = "hardware"
    tflops: dict[str, Figure] = Field(min_length=1)
    """Dense peak of matrix products in TFLOP/s, by dtype ("bf16", "fp16", "tf32", "fp32", "fp64")."""
    processors: Size = 108
    """Streaming multiprocessors, or other units that compute tiles of a matrix product in parallel."""
    memory_gb: Figure
    """Memory of one GPU in GB (10^9 bytes)."""
    memory_gbps: Figure
    gpus_per_node: Size = 8
    link_gbps: Figure
    """Rate of NVLink, or other links between the GPUs of a node."""
    network_gbps: Figure
    """Rate between nodes, per GPU."""
    pcie_gbps: Figure = 32.0
    """Rate to host memory."""
    reserved_gb: Amount = 1.0
    """Memory taken by the driver, the context and communication libraries."""
    efficiency: Figure = 1.0
    """Factor on the fitted efficiency of matrix products: the only constant that a GPU other than the A100 may have of
    its own."""
    attention: Figure = 1.0
    """Fraction of the A100's efficiency that fused attention reaches, if its kernels were written for that GPU."""
    constants: Constants = Constants()
    """The fitted factors."""
    measured: MeasuredRates = MeasuredRates()
    sources: dict[str, str] = Field(default_factory=dict)
    """Sources of the figures."""

    @property
    def runs_at_once(self) -> bool:
        """Whether operators run in the thread that calls them, as on a CPU."""
        return self.measured.cores is not None
