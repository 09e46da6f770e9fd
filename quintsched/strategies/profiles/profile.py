"""Common form of measured times.

    {"name": "gpt-13b on L4",
     "operators": [{"name": "qkv", "kind": "product", "tp": 1, "microbatch": 1, "seq": 2048, "forward_s": 0.0067,
                    "backward_s": 0.0065, "flops": 3.2e11, "weights": 157e6, "output": 63e6, "kept": 63e6}, …],
     "first": ["embedding"], "layer": ["norm", "qkv", …], "last": ["final norm", "head"],
     "collectives": {"all_reduce": {"2": {"sizes": […], "rates": […]}}},
     "message": {…}, "network_message": {…},
     "steps": [{"strategy": {…}, "seconds": {"product": 0.41, "pass": 0.12, …}}]}

`operators` are times of single operators, or of whole blocks, with the way they were cut; `steps` are whole steps by
kind of work, on one GPU. A file may have either, or both. All values are in seconds and bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.descriptions.model import Amount, Count, Description, Figure, Model, RankCount, Size
from quintsched.strategies.descriptions.strategy import Strategy

WorkKind = Literal["product", "attention", "pass", "block", "communication", "optimizer"]
"""Kind of work: bound by matrix products, fused attention, memory passes, a whole block, waiting for other ranks, or
the optimizer step."""

Bytes = Amount


class Operator(Description):
    """One operator of a block, sharded over `tp` GPUs, for one microbatch: its times, and its memory on one GPU."""

    name: str
    kind: WorkKind = "block"
    tp: Size = 1
    microbatch: Size = 1
    seq: Size
    cut: Count = 0
    """Number of the way in which it is cut over `tp`; 0: the usual one."""
    forward_s: Amount
    backward_s: Amount
    """Seconds of the backward; without the weight gradient if the profile's `weight_gradients` is false."""
    flops: Amount = 0.0
    """FLOP of the forward's matrix product, on one GPU."""
    all_reduce_forward: Bytes = 0.0
    """Bytes that the forward all-reduces over `tp` if that is more than 1; the time of that is in `forward_s`."""
    all_reduce_backward: Bytes = 0.0
    weights: Bytes = 0.0
    input: Bytes = 0.0
    """Bytes that a stage receives if this is its first operator, passed tensors included."""
    output: Bytes = 0.0
    passed: Bytes = 0.0
    """Bytes passed on beside the output: the residual, attention values."""
    whole: Bytes = 0.0
    """Bytes of `output` and `passed` that are replicated over `tp`; the rest is sharded."""
    kept: Bytes = 0.0
    """Bytes kept for the backward, the output included."""
    output_freed: bool = False
    """Whether `kept` is freed once the next operator has run, as no backward reads it."""
    scores: bool = False
    """Whether `output` and `kept` are attention scores, which grow with heads and the square of the sequence."""
    in_place: bool = False
    """Whether the backward overwrites its incoming gradient."""
    aside: Bytes = 0.0
    """Bytes kept for a later operator, `aside_until`; a recomputed segment that ends before it keeps them."""
    aside_until: str | None = None
    split: bool = True
    """Whether the GPUs of `tp` divide its work, or each does all of it."""
    enters: Literal["whole", "cut"] = "whole"
    """State of the input over tp; if it differs from the previous operator's output, both exchange it."""
    leaves: Literal["whole", "cut"] = "whole"

    @property
    def sums_forward(self) -> bool:
        """Whether the forward has an all-reduce."""
        return self.tp > 1 and self.all_reduce_forward > 0

    @property
    def sums_backward(self) -> bool:
        """Whether the backward has an all-reduce."""
        return self.tp > 1 and self.all_reduce_backward > 0


class Measures(Description):
    """Sizes of the measured model."""

    hidden: Size
    heads: Size
    vocab: Size


class ProfiledStep(Description):
    """One step of a model on one GPU: seconds by kind of work."""

    model: Model
    strategy: Strategy
    seconds: dict[WorkKind, Amount]
    """Seconds of the GPU's busy time by kind; missing kinds were not measured."""


class Profile(Description):
    """Set of measurements; see the module."""

    name: str = "profile"
    source: str | None = None
    operators: tuple[Operator, ...] = ()
    first: tuple[str, ...] = ()
    """Operators before the first layer, in order."""
    layer: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    measures: Measures | None = None
    """Sizes of the model that the operators belong to; None: they cannot be resized for another model."""
    weight_gradients: bool = True
    """Whether `backward_s` includes the products for weight gradients."""
    alone: bool = False
    """Whether each operator was run separately and repeatedly, unlike in a real run; see `operator_rates`."""
    accumulation_bytes: Amount = 0.0
    """Bytes moved by gradient accumulation, per byte of weights and microbatch, if `backward_s` does not include it."""
    memory_rate: Figure | None = None
    """Bytes per second of a memory pass."""
    collectives: dict[str, dict[RankCount, Curve]] = Field(default_factory=dict)
    """"all_reduce", "all_gather" …: by number of ranks, bytes per second by bytes of one rank's tensor."""
    message: Curve | None = None
    """Messages between two GPUs of a node: bytes per second by bytes."""
    network_message: Curve | None = None
    """Messages between two nodes, likewise."""
    steps: tuple[ProfiledStep, ...] = ()
    kept: dict[RankCount, Figure] = Field(default_factory=dict)
    """Activations that a layer of the steps' model keeps, in multiples of its input, by (sequence-parallel) tp."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Profile:
        known = {operator.name for operator in self.operators}
        missing = [name for name in (*self.first, *self.layer, *self.last) if name not in known]
        if missing:
            raise ValueError(f"no times of {', '.join(dict.fromkeys(missing))}")
        if not self.operators and not self.steps:
            raise ValueError("neither operators nor steps were measured")
        return self
