"""The instructions of a program: one small frozen class each, with only its own fields.

    RecvAct → Fwd → SendAct        RecvGrad → Bwd → SendGrad        AllReduceBucket → ClipGrad → OptStep
               └─ Recompute ─────────────────▶ BwdInput → BwdWeight

    Fwd → SendSkip ~~▶ RecvSkip → Fwd        Bwd → SendSkipGrad ~~▶ RecvSkipGrad → Bwd     (past the stages between)

    GatherParams → Fwd → FreeParams     Bwd → ReduceScatterBucket → … → OptStep → AllGatherBucket     (ZeRO)
    Fwd → OffloadAct → … → FetchAct → Bwd     (activations in the host's memory meanwhile)

    Overlap = a Fwd and a Bwd side by side: while one computes, what the other exchanges inside its stage is on its way

A class says what it is called in a grid (`letters`), which of the costs add up to its time (`costs`, `exchanges`), and
what kind of work it does; its fields are the columns of a plan. What it needs and makes is said in
`quintsched.ir.rules`, and only there; what it does, in the handlers of `quintsched.runtime.interpreter`. A new
instruction is a class here, a rule there, a handler there, and a step of the symbolic proof; a test over all of them
says which is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Instruction:
    """What all instructions have in common."""

    letters: ClassVar[str] = ""
    """How grids and pictures show it; only classes that have letters stand in plans."""
    costs: ClassVar[tuple[str, ...]] = ()
    """Which of the simulator's costs add up to its time; of a computation, to that without its exchanges."""
    exchanges: ClassVar[tuple[str, ...]] = ()
    """Which of the costs add up to its communication inside the stage, which takes its time too."""
    computes: ClassVar[bool] = False
    """Whether it occupies the rank that runs it."""
    begins_backward: ClassVar[bool] = False
    """Whether it takes the saved activations of a microbatch."""
    ends_backward: ClassVar[bool] = False
    """Whether it completes the weight gradient of a microbatch."""
    needs_weights: ClassVar[bool] = False
    """Whether it computes with the weights of its stage; the weight half of a backward does not."""
    whole_mesh: ClassVar[bool] = False
    """Whether it is a collective in which all pipeline ranks take part."""
    among_replicas: ClassVar[bool] = False
    """Whether it is a collective among the replicas of a pipeline rank."""
    on_bucket: ClassVar[Literal["all_reduce", "reduce_scatter", "all_gather"] | None] = None
    """The collective on one gradient bucket that it is: "all_reduce", "reduce_scatter" or "all_gather"."""

    queue: ClassVar[str] = ""
    """The queue, beside computation, in which a rank runs its instructions of this class one after the other."""

    @property
    def op(self) -> str:
        """The name of the instruction in a plan file."""
        return type(self).__name__

    @property
    def sides(self) -> tuple[Instruction, ...]:
        """What it comes to, one after the other: itself, unless it is an `Overlap`."""
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
    """Work of a rank on one microbatch of one stage."""

    computes: ClassVar[bool] = True

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Message(Instruction):
    """One end of a message between two pipeline ranks; `peer` is the other end's pp coordinate."""

    costs: ClassVar[tuple[str, ...]] = ("p2p",)

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
class GatherParams(Instruction):
    """Materialise the full weights of `stage`, of which each rank holds a shard."""

    letters: ClassVar[str] = "GP"
    costs: ClassVar[tuple[str, ...]] = ("gather_params",)
    among_replicas: ClassVar[bool] = True

    stage: int


@dataclass(frozen=True, slots=True)
class RecvAct(Recv):
    """Receive the input activation of `stage`."""

    letters: ClassVar[str] = "RA"


@dataclass(frozen=True, slots=True)
class Fwd(Compute):
    """Run the stage forward; on the last stage of the route, and others that have one, the loss too."""

    letters: ClassVar[str] = "F"
    costs: ClassVar[tuple[str, ...]] = ("forward",)
    exchanges: ClassVar[tuple[str, ...]] = ("exchange",)
    needs_weights: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Recompute(Compute):
    """Rerun a forward whose activations were dropped."""

    letters: ClassVar[str] = "RF"
    costs: ClassVar[tuple[str, ...]] = ("recompute",)
    exchanges: ClassVar[tuple[str, ...]] = ("exchange",)
    needs_weights: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class SendAct(Send):
    """Send the output activation of `stage`."""

    letters: ClassVar[str] = "SA"


@dataclass(frozen=True, slots=True)
class RecvSkip(Recv):
    """Receive what `stage`, and later stages of this rank, take of a named skip."""

    letters: ClassVar[str] = "RK"

    skip: str


@dataclass(frozen=True, slots=True)
class SendSkip(Send):
    """Send a named skip, which `stage` makes, to a rank whose stages take it."""

    letters: ClassVar[str] = "SK"

    skip: str


@dataclass(frozen=True, slots=True)
class HostCopy(Instruction):
    """A copy of a microbatch's activations between a rank's memory and its host's, beside computation."""

    costs: ClassVar[tuple[str, ...]] = ("host_latency", "host_bandwidth")

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class OffloadAct(HostCopy):
    """Move activations to the host's memory: the copy begins with the end of their forward, and has ended here."""

    letters: ClassVar[str] = "OA"
    queue: ClassVar[str] = "offload"


@dataclass(frozen=True, slots=True)
class FetchAct(HostCopy):
    """Copy activations back from the host's memory: the copy begins here, and their backward waits for it."""

    letters: ClassVar[str] = "FA"
    queue: ClassVar[str] = "fetch"


@dataclass(frozen=True, slots=True)
class RecvGrad(Recv):
    """Receive the gradient of `stage`'s output."""

    letters: ClassVar[str] = "RG"


@dataclass(frozen=True, slots=True)
class Bwd(Compute):
    """Full backward: the gradient of the input and of the weights."""

    letters: ClassVar[str] = "B"
    costs: ClassVar[tuple[str, ...]] = ("backward_input", "backward_weight")
    exchanges: ClassVar[tuple[str, ...]] = ("exchange_backward",)
    begins_backward: ClassVar[bool] = True
    ends_backward: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BwdInput(Compute):
    """The half of a backward that makes the gradient of the input."""

    letters: ClassVar[str] = "I"
    costs: ClassVar[tuple[str, ...]] = ("backward_input",)
    exchanges: ClassVar[tuple[str, ...]] = ("exchange_backward",)
    begins_backward: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BwdWeight(Compute):
    """The half of a backward that makes the gradient of the weights."""

    letters: ClassVar[str] = "W"
    costs: ClassVar[tuple[str, ...]] = ("backward_weight",)
    ends_backward: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Overlap(Instruction):
    """A `Fwd` and a `Bwd`, each given as (stage, microbatch), side by side: one computes while the other exchanges."""

    letters: ClassVar[str] = "&"
    costs: ClassVar[tuple[str, ...]] = ("forward", "backward_input", "backward_weight")
    exchanges: ClassVar[tuple[str, ...]] = ("exchange", "exchange_backward")
    computes: ClassVar[bool] = True

    forward: tuple[int, int]
    backward: tuple[int, int]

    @property
    def sides(self) -> tuple[Instruction, ...]:
        """The forward and the backward."""
        return Fwd(*self.forward), Bwd(*self.backward)


@dataclass(frozen=True, slots=True)
class FreeParams(Instruction):
    """Drop the full weights of `stage`."""

    letters: ClassVar[str] = "FP"

    stage: int


@dataclass(frozen=True, slots=True)
class SendGrad(Send):
    """Send the gradient of `stage`'s input."""

    letters: ClassVar[str] = "SG"


@dataclass(frozen=True, slots=True)
class RecvSkipGrad(Recv):
    """Receive the gradient of a skip that `stage` makes or takes, added up over all stages that take it after it."""

    letters: ClassVar[str] = "RKG"

    skip: str


@dataclass(frozen=True, slots=True)
class SendSkipGrad(Send):
    """Send the gradient of a skip that `stage` takes, added up over it and all stages that take it after it."""

    letters: ClassVar[str] = "SKG"

    skip: str


@dataclass(frozen=True, slots=True)
class SyncTied(Instruction):
    """Add up the gradients of what several stages hold: a named weight, or all that twins do (params "stage")."""

    letters: ClassVar[str] = "tied"

    params: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OnBucket(Instruction):
    """A collective over `axes`, the replicas, on one gradient bucket of `stage`."""

    among_replicas: ClassVar[bool] = True

    stage: int
    bucket: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllReduceBucket(OnBucket):
    """Sum one gradient bucket of `stage` over the named axes."""

    letters: ClassVar[str] = "AR"
    costs: ClassVar[tuple[str, ...]] = ("reduce_scatter", "all_gather")
    on_bucket = "all_reduce"


@dataclass(frozen=True, slots=True)
class ReduceScatterBucket(OnBucket):
    """Sum what a gradient bucket of `stage` holds since its last such reduction, and keep a shard of the sum."""

    letters: ClassVar[str] = "RS"
    costs: ClassVar[tuple[str, ...]] = ("reduce_scatter",)
    on_bucket = "reduce_scatter"

    part: int


@dataclass(frozen=True, slots=True)
class ShareMetrics(Instruction):
    """Give losses, loss weight and metrics of all stages to every rank, without waiting for them."""

    letters: ClassVar[str] = "metrics"
    whole_mesh: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ClipGrad(Instruction):
    """The global gradient norm over the whole mesh; scales where the job gives a threshold."""

    letters: ClassVar[str] = "clip"
    costs: ClassVar[tuple[str, ...]] = ("clip",)
    whole_mesh: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class OptStep(Instruction):
    """The optimizer step of these stages."""

    letters: ClassVar[str] = "step"
    costs: ClassVar[tuple[str, ...]] = ("optimizer",)

    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllGatherBucket(OnBucket):
    """Give every rank the whole weights of one bucket of `stage` again, of which each has stepped its shard."""

    letters: ClassVar[str] = "AG"
    costs: ClassVar[tuple[str, ...]] = ("all_gather",)
    on_bucket = "all_gather"


ALL: tuple[type[Instruction], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Instruction) and kind.letters
)
"""Every instruction there is, in the order of this file."""

COMPUTATIONS: tuple[type[Compute], ...] = tuple(kind for kind in ALL if issubclass(kind, Compute))
"""Every computation on one microbatch of one stage."""

COMPUTING: tuple[type[Instruction], ...] = tuple(kind for kind in ALL if kind.computes)
"""What a schedule may yield: these, and two of them side by side."""

SkipMessage: TypeAlias = RecvSkip | SendSkip | RecvSkipGrad | SendSkipGrad
SKIP_MESSAGES = (RecvSkip, SendSkip, RecvSkipGrad, SendSkipGrad)

BEGINS_BACKWARD = tuple(kind for kind in COMPUTATIONS if kind.begins_backward)
ENDS_BACKWARD = tuple(kind for kind in COMPUTATIONS if kind.ends_backward)
NEEDS_WEIGHTS = tuple(kind for kind in COMPUTATIONS if kind.needs_weights)
WHOLE_MESH = tuple(kind for kind in ALL if kind.whole_mesh)
OWN_QUEUES = {one.queue: tuple(kind for kind in ALL if kind.queue == one.queue) for one in ALL if one.queue}
"""What runs beside computation on the rank alone, by queue."""

AMONG_REPLICAS = tuple(kind for kind in ALL if kind.among_replicas)


def short(instruction: Instruction, *, with_stage: bool = True) -> str:
    """Return a few letters for a grid: `F3` or `1F3` for the forward of microbatch 3 (on stage 1), `F3&B1` for two."""
    if len(instruction.sides) > 1:
        return instruction.letters.join(short(side, with_stage=with_stage) for side in instruction.sides)
    stage = str(instruction.stage) if with_stage and hasattr(instruction, "stage") else ""
    number: object = getattr(instruction, "microbatch", getattr(instruction, "bucket", ""))
    return f"{stage}{instruction.letters}{number}"
