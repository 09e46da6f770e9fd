"""Words that users may give for settings: transports, rules of messages, dtypes, methods, reductions, partitions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

WireName = Literal["auto", "gloo", "nccl"]
"""Transport between processes; "auto": an accelerator's library where each rank has one, else gloo."""

TransportName = Literal[WireName, "local"]
"""Transport of messages: a wire between processes, or "local", the threads of one process."""

StrictRules = Literal["rendezvous", "nccl"]
Rules = Literal["mailbox", StrictRules]
"""Rules by which a wire matches messages, from the most lenient to the strictest.

mailbox     matched by tag; copied when it is sent, so that no sender ever waits
rendezvous  matched by tag; a send completes once its receive is posted: gloo's rule
nccl        tags ignored, the k-th send of a directed channel meets its k-th receive; a send completes then
"""

Start = Literal["new", "fresh", "resume"]
"""Start mode of a run: in an unused folder; moving an earlier run away; from its newest whole checkpoint."""

Precision = Literal["float32", "float64", "bfloat16"]
"""Dtype to compute in."""

DTYPE_NAMES: Mapping[Precision, str] = MappingProxyType({"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"})
"""Names of dtypes in strategies and descriptions of hardware."""

ContextMethod = Literal["ring", "gather", "ulysses"]
"""Method of attention over the slices of a sequence, which the ranks of cp hold."""

Proofs = Literal["foreign", "all", "none"]
"""Blocks proved to compute the same when sharded as when whole: all but the built-in ones, all, or none."""

LossOver = Literal["samples", "targets", "sum", "microbatch"]
"""Reduction of a scalar loss: a mean over samples, over targets that are not -100, a sum over the samples,
or a value per microbatch, as contrastive losses have."""

ZeroSplit = Literal["auto", "element", "parameter"]
"""Partition of parameters by ZeRO: equal segments, whole parameters, or these where an optimizer needs it."""

BufferChoice = Literal["merge", "sync", "first", "refuse"]
"""Handling of buffers that a forward changes, where there are replicas: see `stage.merge_replica_buffers`."""
