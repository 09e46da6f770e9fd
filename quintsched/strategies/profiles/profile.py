"""The one form of measured times.

    {"name": "gpt-13b on L4",
     "operators": [{"name": "qkv", "kind": "product", "tp": 1, "microbatch": 1, "seq": 2048, "forward_s": 0.0067,
                    "backward_s": 0.0065, "flops": 3.2e11, "weights": 157e6, "output": 63e6, "kept": 63e6}, …],
     "first": ["embedding"], "layer": ["norm", "qkv", …], "last": ["final norm", "head"],
     "collectives": {"all_reduce": {"2": {"sizes": […], "rates": […]}}},
     "message": {…}, "network_message": {…},
     "steps": [{"strategy": {…}, "seconds": {"product": 0.41, "pass": 0.12, …}}]}

`operators` are times of single operators, or of whole blocks, by how they were cut; `steps` are whole steps by kind of
work, on one GPU. A file may have either, or both. Seconds and bytes throughout.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.descriptions.model import Amount, Count, Description, Figure, Model, Ranks, Size
from quintsched.strategies.descriptions.strategy import Strategy

Kind = Literal["product", "attention", "pass", "block", "communication", "optimizer"]
"""Work that matrix products bound, fused attention, passes over memory, all of a block together, waiting for other
ranks, and stepping the weights."""

Bytes = Amount


class Operator(Description):
    """One operator of a block, cut over `tp` GPUs, for one microbatch: its times, and what it holds on one GPU."""

    name: str
    kind: Kind = "block"
    tp: Size = 1
    microbatch: Size = 1
    seq: Size
    cut: Count = 0
    """Which of several ways to cut it over `tp`; 0: the usual one."""
    forward_s: Amount
    backward_s: Amount
    """Without the weight's half, where the profile's `weight_gradients` says so."""
    flops: Amount = 0.0
    """Operations of the forward's matrix product, on one GPU."""
    all_reduce_forward: Bytes = 0.0
    """What the forward sums over `tp` where that is more than 1; the time of that is in `forward_s`."""
    all_reduce_backward: Bytes = 0.0
    weights: Bytes = 0.0
    input: Bytes = 0.0
    """Of the input that the first operator of a stage receives, with what passes it by."""
    output: Bytes = 0.0
    passed: Bytes = 0.0
    """What is handed on beside the output: the residual, values of attention."""
    whole: Bytes = 0.0
    """Of `output` and `passed`, what every GPU of `tp` has alike; the rest is cut."""
    kept: Bytes = 0.0
    """What stays for the backward, the output included."""
    output_freed: bool = False
    """Whether nothing of `kept` stays once the next operator has run: no backward reads it."""
    scores: bool = False
    """Whether `output` and `kept` are attention's scores, which grow with heads and the square of the sequence."""
    in_place: bool = False
    """Whether the backward overwrites the gradient it is given."""
    aside: Bytes = 0.0
    """What is kept for an operator further on, `aside_until`, which a recomputed segment that ends before it keeps."""
    aside_until: str | None = None
    split: bool = True
    """Whether the GPUs of `tp` share out its work, or each does all of it."""
    enters: Literal["whole", "cut"] = "whole"
    """Whether the input is cut over tp; where the operator before leaves another state, both exchange it."""
    leaves: Literal["whole", "cut"] = "whole"

    @property
    def sums_forward(self) -> bool:
        """Whether the forward waits for other GPUs."""
        return self.tp > 1 and self.all_reduce_forward > 0

    @property
    def sums_backward(self) -> bool:
        """Whether the backward does."""
        return self.tp > 1 and self.all_reduce_backward > 0


class Measures(Description):
    """The sizes of the model that was measured."""

    hidden: Size
    heads: Size
    vocab: Size


class MeasuredStep(Description):
    """One step of a model on one GPU: seconds by kind of work."""

    model: Model
    strategy: Strategy
    seconds: dict[Kind, Amount]
    """Of the GPU's busy time; what is missing was not measured."""


class Profile(Description):
    """What was measured; see the module."""

    name: str = "profile"
    source: str | None = None
    operators: tuple[Operator, ...] = ()
    first: tuple[str, ...] = ()
    """The operators before the first layer, in order."""
    layer: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    measures: Measures | None = None
    """Of the model whose operators they are; None: no other model's can be told from them."""
    weight_gradients: bool = True
    """Whether `backward_s` includes the products for weights' gradients."""
    alone: bool = False
    """Whether each operator was run by itself, over and over, as no run does; see `rates`."""
    accumulation_bytes: Amount = 0.0
    """What adding up gradients moves, for each byte of weights and microbatch, where `backward_s` does not have it."""
    memory_rate: Figure | None = None
    """Bytes per second that a pass over memory reaches."""
    collectives: dict[str, dict[Ranks, Curve]] = Field(default_factory=dict)
    """"all_reduce", "all_gather" …: by number of ranks, bytes per second by bytes of one rank's tensor."""
    message: Curve | None = None
    """Between two GPUs of a node: bytes per second by bytes."""
    network_message: Curve | None = None
    """Between two nodes."""
    steps: tuple[MeasuredStep, ...] = ()

    @model_validator(mode="after")
    def _names_are_known(self) -> Profile:
        known = {operator.name for operator in self.operators}
        missing = [name for name in (*self.first, *self.layer, *self.last) if name not in known]
        if missing:
            raise ValueError(f"no times of {', '.join(dict.fromkeys(missing))}")
        if not self.operators and not self.steps:
            raise ValueError("neither operators nor steps were measured")
        return self
