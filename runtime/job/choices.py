"""The names that a job file chooses from, each list said once: the rooms that act on a name take it from here.

    job file ──▶ config ──▶ choices ◀── comm (wires and their rules), parallel (attention, splits), train (dtypes)

How gradients are summed over replicas is the planner's to say: `quintsched.collectives.Means`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Literal

WireName = Literal["auto", "gloo", "nccl"]
"""What carries messages between processes; "auto": an accelerator's library where each rank has one, else gloo."""

TransportName = Literal[WireName, "local"]
"""What carries messages: a wire between processes, or "local", the threads of one process."""

StrictRules = Literal["rendezvous", "nccl"]
Rules = Literal["mailbox", StrictRules]
"""What a wire does with a message, from the most lenient to the strictest.

mailbox     matched by tag; copied when it is sent, so that no sender ever waits
rendezvous  matched by tag; a send is done when its receive is there: gloo's rule
nccl        tags ignored, the k-th send of a directed channel meets its k-th receive; a send is done when it is there
"""

Precision = Literal["float32", "float64", "bfloat16"]
"""Type to compute in."""

DTYPE_NAMES: Mapping[Precision, str] = MappingProxyType({"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"})
"""What strategies and descriptions of hardware call them."""

ContextMethod = Literal["ring", "gather", "ulysses"]
"""How attention reaches over the slices of a sequence that lie on the ranks of cp."""

Proofs = Literal["foreign", "all", "none"]
"""Which blocks are proved to give the same numbers cut as whole: all but the built-in ones, all, or none."""


LossOver = Literal["samples", "targets", "sum", "microbatch"]
"""What a loss is over that is one number: a mean over samples, over targets that are not -100, a sum over the samples,
or what each microbatch has of its own, as contrastive losses do."""

ZeroSplit = Literal["auto", "element", "parameter"]
"""What of parameters ZeRO gives to replicas: equal segments, whole parameters, or these where an optimizer needs it."""


BufferChoice = Literal["merge", "sync", "first", "refuse"]
"""What becomes of buffers that a forward changes, where there are replicas: see `stage.buffers`."""


class TensorSplit(Enum):
    """What tensor parallelism does to a layer."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATE = "replicate"


Start = Literal["new", "fresh", "resume"]
"""How a run begins: where no run was saved; by moving that one away; from its newest checkpoint that is whole."""
