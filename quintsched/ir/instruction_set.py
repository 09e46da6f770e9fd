"""Instruction set of a program: one small frozen class per instruction, with only its own fields.

    RecvAct → Fwd → SendAct        RecvGrad → Bwd → SendGrad        AllReduceBucket → ClipGrad → OptStep
               └─ Recompute ─────────────────▶ BwdInput → BwdWeight

    Fwd → SendSkip ~~▶ RecvSkip → Fwd        Bwd → SendSkipGrad ~~▶ RecvSkipGrad → Bwd     (past the stages between)

    GatherParams → Fwd → FreeParams     Bwd → ReduceScatterBucket → … → OptStep → AllGatherBucket     (ZeRO)
    Fwd → OffloadAct → … → FetchAct → Bwd     (activations in the host's memory meanwhile)
    Fwd → LendAct ~~▶ HoldAct → … → ReturnAct ~~▶ ReclaimAct → Bwd     (in another rank's memory meanwhile)

    Overlap = a Fwd and a Bwd side by side: one computes while the other's exchanges inside its stage are in flight

A class declares its letters in a grid (`letters`), the costs that add up to its time (`costs`, `exchanges`), and its
kind of work; its fields are the columns of a plan. Its operands are declared in `instruction_inputs_and_outputs` only,
its execution in the handlers of `quintsched.runtime.interpreter`. A new instruction needs a class here, a rule,
a handler and a step of the symbolic proof; a test over all classes reports what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from quintsched.ir.instruction_base_classes import Compute as Compute
from quintsched.ir.instruction_base_classes import HostCopy as HostCopy
from quintsched.ir.instruction_base_classes import Instruction as Instruction
from quintsched.ir.instruction_base_classes import Message as Message
from quintsched.ir.instruction_base_classes import OnBucket as OnBucket
from quintsched.ir.instruction_base_classes import Recv as Recv
from quintsched.ir.instruction_base_classes import Send as Send


@dataclass(frozen=True, slots=True)
class GatherParams(Instruction):
    """All-gather the full weights of `stage`, of which each replica holds a shard."""

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
    """Run the stage forward, and its loss on the last stage of the route and on other stages that have one."""

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
    """Receive a named skip, for `stage` and later stages of this rank that take it."""

    letters: ClassVar[str] = "RK"

    skip: str


@dataclass(frozen=True, slots=True)
class SendSkip(Send):
    """Send a named skip, which `stage` makes, to a rank whose stages take it."""

    letters: ClassVar[str] = "SK"

    skip: str


@dataclass(frozen=True, slots=True)
class OffloadAct(HostCopy):
    """End of a copy of activations to host memory; the copy starts when their forward ends."""

    letters: ClassVar[str] = "OA"
    queue: ClassVar[str] = "offload"


@dataclass(frozen=True, slots=True)
class FetchAct(HostCopy):
    """Start of a copy of activations back from host memory; their backward waits for its end."""

    letters: ClassVar[str] = "FA"
    queue: ClassVar[str] = "fetch"


@dataclass(frozen=True, slots=True)
class LendAct(Send):
    """Send saved activations to rank `peer`, which has memory to spare; when they are sent, their memory is free."""

    letters: ClassVar[str] = "LA"
    costs: ClassVar[tuple[str, ...]] = ("p2p", "activation_message")


@dataclass(frozen=True, slots=True)
class HoldAct(Recv):
    """Receive activations from rank `peer`, which has their stage, and keep them in this rank's memory."""

    letters: ClassVar[str] = "HA"
    costs: ClassVar[tuple[str, ...]] = ("p2p", "activation_message")


@dataclass(frozen=True, slots=True)
class ReturnAct(Send):
    """Send held activations back to rank `peer`, whose backward needs them."""

    letters: ClassVar[str] = "TA"
    costs: ClassVar[tuple[str, ...]] = ("p2p", "activation_message")


@dataclass(frozen=True, slots=True)
class ReclaimAct(Recv):
    """Receive lent activations back from rank `peer`."""

    letters: ClassVar[str] = "CA"
    costs: ClassVar[tuple[str, ...]] = ("p2p", "activation_message")


@dataclass(frozen=True, slots=True)
class RecvGrad(Recv):
    """Receive the gradient of `stage`'s output."""

    letters: ClassVar[str] = "RG"


@dataclass(frozen=True, slots=True)
class Bwd(Compute):
    """Full backward: gradients of the input and of the weights."""

    letters: ClassVar[str] = "B"
    costs: ClassVar[tuple[str, ...]] = ("backward_input", "backward_weight")
    exchanges: ClassVar[tuple[str, ...]] = ("exchange_backward",)
    begins_backward: ClassVar[bool] = True
    ends_backward: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BwdInput(Compute):
    """Input half of a backward: computes the gradient of the input."""

    letters: ClassVar[str] = "I"
    costs: ClassVar[tuple[str, ...]] = ("backward_input",)
    exchanges: ClassVar[tuple[str, ...]] = ("exchange_backward",)
    begins_backward: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BwdWeight(Compute):
    """Weight half of a backward: computes the gradient of the weights."""

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
        """Forward and backward as instructions."""
        return Fwd(*self.forward), Bwd(*self.backward)


@dataclass(frozen=True, slots=True)
class FreeParams(Instruction):
    """Free the full weights of `stage`, keeping the shard."""

    letters: ClassVar[str] = "FP"

    stage: int


@dataclass(frozen=True, slots=True)
class SendGrad(Send):
    """Send the gradient of `stage`'s input."""

    letters: ClassVar[str] = "SG"


@dataclass(frozen=True, slots=True)
class RecvSkipGrad(Recv):
    """Receive the gradient of a skip that `stage` makes or takes, summed over all stages that take it later."""

    letters: ClassVar[str] = "RKG"

    skip: str


@dataclass(frozen=True, slots=True)
class SendSkipGrad(Send):
    """Send the gradient of a skip that `stage` takes, summed over this and all stages that take it later."""

    letters: ClassVar[str] = "SKG"

    skip: str


@dataclass(frozen=True, slots=True)
class SyncTied(Instruction):
    """Sum gradients of weights that several stages hold: a named weight, or all weights of twins (params "stage")."""

    letters: ClassVar[str] = "tied"

    params: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllReduceBucket(OnBucket):
    """Sum one gradient bucket of `stage` over the named axes, from when the last backward has filled it."""

    letters: ClassVar[str] = "AR"
    costs: ClassVar[tuple[str, ...]] = ("reduce_scatter", "all_gather")
    on_bucket = "all_reduce"


@dataclass(frozen=True, slots=True)
class ReduceScatterBucket(OnBucket):
    """Sum the gradients that a bucket of `stage` gathered since its last such reduction; keep a shard of the sum."""

    letters: ClassVar[str] = "RS"
    costs: ClassVar[tuple[str, ...]] = ("reduce_scatter",)
    on_bucket = "reduce_scatter"

    part: int


@dataclass(frozen=True, slots=True)
class ShareMetrics(Instruction):
    """Start the exchange of losses, loss weights and metrics of all stages among all ranks, without waiting for it."""

    letters: ClassVar[str] = "metrics"
    whole_mesh: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ClipGrad(Instruction):
    """Compute the global gradient norm over the whole mesh; scale gradients if the job sets a threshold."""

    letters: ClassVar[str] = "clip"
    costs: ClassVar[tuple[str, ...]] = ("clip",)
    whole_mesh: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class OptStep(Instruction):
    """Run the optimizer step of these stages."""

    letters: ClassVar[str] = "step"
    costs: ClassVar[tuple[str, ...]] = ("optimizer",)

    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllGatherBucket(OnBucket):
    """All-gather the updated weights of one bucket of `stage`, of which each replica has stepped its shard."""

    letters: ClassVar[str] = "AG"
    costs: ClassVar[tuple[str, ...]] = ("all_gather",)
    on_bucket = "all_gather"


ALL: tuple[type[Instruction], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Instruction) and kind.letters
)
"""All classes of instructions, in the order of this file."""

COMPUTATIONS: tuple[type[Compute], ...] = tuple(kind for kind in ALL if issubclass(kind, Compute))
"""Classes of computations on one microbatch of one stage."""

COMPUTING: tuple[type[Instruction], ...] = tuple(kind for kind in ALL if kind.computes)
"""Classes that a schedule may yield: computations, and overlapped pairs of them."""

SkipMessage: TypeAlias = RecvSkip | SendSkip | RecvSkipGrad | SendSkipGrad
SKIP_MESSAGES = (RecvSkip, SendSkip, RecvSkipGrad, SendSkipGrad)
"""Messages of skips, and of their gradients."""

LOANS = (LendAct, HoldAct, ReturnAct, ReclaimAct)
"""Messages of lent activations: their rank lends and reclaims them, another one holds and returns them."""

BEGINS_BACKWARD = tuple(kind for kind in COMPUTATIONS if kind.begins_backward)
"""Computations that consume the saved activations of a microbatch."""
ENDS_BACKWARD = tuple(kind for kind in COMPUTATIONS if kind.ends_backward)
"""Computations that complete the weight gradient of a microbatch."""
NEEDS_WEIGHTS = tuple(kind for kind in COMPUTATIONS if kind.needs_weights)
"""Computations that use the weights of their stage."""
WHOLE_MESH = tuple(kind for kind in ALL if kind.whole_mesh)
"""Collectives of all pipeline ranks."""
OWN_QUEUES = {one.queue: tuple(kind for kind in ALL if kind.queue == one.queue) for one in ALL if one.queue}
"""Classes that run beside computation on the rank alone, by queue."""

AMONG_REPLICAS = tuple(kind for kind in ALL if kind.among_replicas)
"""Collectives among the replicas of a pipeline rank."""


def short(instruction: Instruction, *, with_stage: bool = True) -> str:
    """Return an abbreviation: `F3` or `1F3` for the forward of microbatch 3 (on stage 1), `F3&B1` for two."""
    if len(instruction.sides) > 1:
        return instruction.letters.join(short(side, with_stage=with_stage) for side in instruction.sides)
    stage = str(instruction.stage) if with_stage and hasattr(instruction, "stage") else ""
    number: object = getattr(instruction, "microbatch", getattr(instruction, "bucket", ""))
    return f"{stage}{instruction.letters}{number}"
