"""The instructions of a program: one small frozen class each, with only its own fields.

    RecvAct → Fwd → SendAct        RecvGrad → Bwd → SendGrad        AllReduceBucket → ClipGrad → OptStep
               └─ Recompute ─────────────────▶ BwdInput → BwdWeight

    GatherParams → Fwd → FreeParams     Bwd → ReduceScatterBucket → … → OptStep → AllGatherBucket     (ZeRO)

What an instruction needs and makes is said in `quintsched.ir.dataflow`, and only there; what it does, in the
handlers of `quintsched.runtime.interpreter`. A new instruction is a class here, a rule there, a handler there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Instruction:
    """What all instructions have in common."""

    @property
    def op(self) -> str:
        """The name of the instruction in a plan file."""
        return type(self).__name__

    def __str__(self) -> str:
        inner = ", ".join(f"{field.name}={_plain(getattr(self, field.name))}" for field in fields(self))
        return f"{self.op}({inner})"


def _plain(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Work of a rank on one microbatch of one stage."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Message(Instruction):
    """One end of a message between two pipeline ranks; `peer` is the other end's pp coordinate."""

    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Send(Message):
    """The sending end of a message."""


@dataclass(frozen=True, slots=True)
class Recv(Message):
    """The receiving end of a message."""


@dataclass(frozen=True, slots=True)
class RecvAct(Recv):
    """Receive the input activation of `stage`."""


@dataclass(frozen=True, slots=True)
class Fwd(Compute):
    """Run the stage forward; on the last stage of the route, the loss too."""


@dataclass(frozen=True, slots=True)
class Recompute(Compute):
    """Rerun a forward whose activations were dropped."""


@dataclass(frozen=True, slots=True)
class SendAct(Send):
    """Send the output activation of `stage`."""


@dataclass(frozen=True, slots=True)
class RecvGrad(Recv):
    """Receive the gradient of `stage`'s output."""


@dataclass(frozen=True, slots=True)
class Bwd(Compute):
    """Full backward: the gradient of the input and of the weights."""


@dataclass(frozen=True, slots=True)
class BwdInput(Compute):
    """The half of a backward that makes the gradient of the input."""


@dataclass(frozen=True, slots=True)
class BwdWeight(Compute):
    """The half of a backward that makes the gradient of the weights."""


@dataclass(frozen=True, slots=True)
class SendGrad(Send):
    """Send the gradient of `stage`'s input."""


@dataclass(frozen=True, slots=True)
class AllReduceBucket(Instruction):
    """Sum one gradient bucket of `stage` over the named axes."""

    stage: int
    bucket: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReduceScatterBucket(Instruction):
    """Sum what a gradient bucket of `stage` holds since the last such part, and keep only a share of the sum."""

    stage: int
    bucket: int
    axes: tuple[str, ...]
    part: int


@dataclass(frozen=True, slots=True)
class AllGatherBucket(Instruction):
    """Give every rank the whole weights of one bucket of `stage` again, of which each has stepped its share."""

    stage: int
    bucket: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GatherParams(Instruction):
    """Materialise the full weights of `stage`, of which each rank holds a share."""

    stage: int


@dataclass(frozen=True, slots=True)
class FreeParams(Instruction):
    """Drop the full weights of `stage`."""

    stage: int


@dataclass(frozen=True, slots=True)
class SyncTied(Instruction):
    """Add up the gradients of what several stages hold: a named weight, or all that twins do (params "stage")."""

    params: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShareMetrics(Instruction):
    """Give loss, loss weight and metrics of the last stage to every rank, without waiting for them."""


@dataclass(frozen=True, slots=True)
class ClipGrad(Instruction):
    """The global gradient norm over the whole mesh; scales where the job gives a threshold."""


@dataclass(frozen=True, slots=True)
class OptStep(Instruction):
    """The optimizer step of these stages."""

    stages: tuple[int, ...]


ALL: tuple[type[Instruction], ...] = (
    GatherParams,
    RecvAct,
    Fwd,
    Recompute,
    SendAct,
    RecvGrad,
    Bwd,
    BwdInput,
    BwdWeight,
    FreeParams,
    SendGrad,
    SyncTied,
    AllReduceBucket,
    ReduceScatterBucket,
    ShareMetrics,
    ClipGrad,
    OptStep,
    AllGatherBucket,
)
"""Every instruction there is."""

BEGINS_BACKWARD: tuple[type[Compute], ...] = (Bwd, BwdInput)
"""What takes the saved activations of a microbatch."""

ENDS_BACKWARD: tuple[type[Compute], ...] = (Bwd, BwdWeight)
"""What completes the weight gradient of a microbatch."""

WHOLE_MESH: tuple[type[Instruction], ...] = (ShareMetrics, ClipGrad)
"""The collectives in which all pipeline ranks take part."""

NEEDS_WEIGHTS: tuple[type[Compute], ...] = (Fwd, Recompute, Bwd, BwdInput)
"""What computes with the weights of its stage; the weight half of a backward does not."""

ON_BUCKETS: tuple[type[Instruction], ...] = (AllReduceBucket, ReduceScatterBucket, AllGatherBucket)
"""The collectives on one bucket of a stage, among replicas."""

AMONG_REPLICAS: tuple[type[Instruction], ...] = (*ON_BUCKETS, GatherParams)
"""All collectives among replicas."""

SHORT: dict[type[Instruction], str] = {
    RecvAct: "RA",
    Fwd: "F",
    Recompute: "RF",
    SendAct: "SA",
    RecvGrad: "RG",
    Bwd: "B",
    BwdInput: "I",
    BwdWeight: "W",
    SendGrad: "SG",
    SyncTied: "tied",
    AllReduceBucket: "AR",
    ReduceScatterBucket: "RS",
    AllGatherBucket: "AG",
    GatherParams: "GP",
    FreeParams: "FP",
    ShareMetrics: "metrics",
    ClipGrad: "clip",
    OptStep: "step",
}
"""The letters by which grids and pictures show an instruction."""


def short(instruction: Instruction, *, with_stage: bool = True) -> str:
    """Return a few letters for a grid: `F3` or `1F3` for the forward of microbatch 3 (on stage 1)."""
    letters = SHORT[type(instruction)]
    stage = str(instruction.stage) if with_stage and hasattr(instruction, "stage") else ""
    number = getattr(instruction, "microbatch", getattr(instruction, "bucket", ""))
    return f"{stage}{letters}{number}"
