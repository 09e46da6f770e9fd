"""Base classes of instructions: what each declares, and what computations, messages and copies have in common.

    Instruction ─┬─ Compute      Fwd, Bwd, …
                 ├─ Message ─┬─ Send     SendAct, …
                 │           └─ Recv     RecvAct, …
                 ├─ HostCopy     OffloadAct, FetchAct
                 └─ OnBucket     AllReduceBucket, …

The instructions themselves are in `quintsched.ir.instruction_set`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class Instruction:
    """Base class of all instructions."""

    letters: ClassVar[str] = ""
    """Abbreviation in grids and pictures; only classes that have one may occur in plans."""
    costs: ClassVar[tuple[str, ...]] = ()
    """Names of the simulator's costs that add up to its time; for computations, without exchanges."""
    exchanges: ClassVar[tuple[str, ...]] = ()
    """Names of the costs that add up to its communication inside the stage, which is part of its time."""
    computes: ClassVar[bool] = False
    """Whether it occupies the compute of its rank."""
    begins_backward: ClassVar[bool] = False
    """Whether it consumes the saved activations of a microbatch."""
    ends_backward: ClassVar[bool] = False
    """Whether it completes the weight gradient of a microbatch."""
    needs_weights: ClassVar[bool] = False
    """Whether it computes with the weights of its stage; the weight half of a backward does not."""
    whole_mesh: ClassVar[bool] = False
    """Whether it is a collective of all pipeline ranks."""
    among_replicas: ClassVar[bool] = False
    """Whether it is a collective among the replicas of a pipeline rank."""
    on_bucket: ClassVar[Literal["all_reduce", "reduce_scatter", "all_gather"] | None] = None
    """Collective that it is on one gradient bucket: "all_reduce", "reduce_scatter" or "all_gather"."""

    queue: ClassVar[str] = ""
    """Name of the queue, beside computation, in which a rank runs instructions of this class one by one."""

    @property
    def op(self) -> str:
        """Name of the instruction in a plan file."""
        return type(self).__name__

    @property
    def sides(self) -> tuple[Instruction, ...]:
        """Instructions that it stands for: itself, or the forward and the backward of an `Overlap`."""
        return (self,)

    def __str__(self) -> str:
        inner = ", ".join(f"{field.name}={_plain(getattr(self, field.name), field.type)}" for field in fields(self))
        return f"{self.op}({inner})"


def _plain(value: object, of_type: object) -> str:
    if isinstance(value, tuple) and of_type != "tuple[int, int]":
        return "+".join(map(str, value))
    return str(value)


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Computation on one microbatch of one stage."""

    computes: ClassVar[bool] = True

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Message(Instruction):
    """One end of a message between two pipeline ranks; `peer` is the pp coordinate of the other end."""

    costs: ClassVar[tuple[str, ...]] = ("p2p",)

    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Send(Message):
    """Sending end of a message."""


@dataclass(frozen=True, slots=True)
class Recv(Message):
    """Receiving end of a message."""


@dataclass(frozen=True, slots=True)
class HostCopy(Instruction):
    """Copy of a microbatch's activations between device and host memory, concurrent with computation."""

    costs: ClassVar[tuple[str, ...]] = ("host_latency", "host_bandwidth")

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class OnBucket(Instruction):
    """Collective over `axes` (of replicas) on one gradient bucket of `stage`."""

    among_replicas: ClassVar[bool] = True

    stage: int
    bucket: int
    axes: tuple[str, ...]
