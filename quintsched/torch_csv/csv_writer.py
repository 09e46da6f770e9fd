"""Export of a plan to a file that torch's `_PipelineScheduleRuntime._load_csv` reads.

`format="compute_only"` loads the result of `dumps(plan, compute_only=True)`, `format="compute_comms"` the others; torch
2.15 and later needs `waits`. FSDP-wrapped stages want compute-only: torch then adds its own `UNSHARD` and `RESHARD`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintsched.errors import UsageError, counted
from quintsched.ir.instruction_set import (
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    Compute,
    FreeParams,
    Fwd,
    GatherParams,
    HostCopy,
    Instruction,
    Message,
    OptStep,
    Overlap,
    ReduceScatterBucket,
    SendAct,
    SendGrad,
    ShareMetrics,
)
from quintsched.ir.plan_data import PlanData, listed
from quintsched.torch_csv.csv_cells import written
from quintsched.torch_csv.csv_vocabulary import COMPUTATIONS, MESSAGE_WORDS, SHARDING, Word
from quintsched.verify.soundness import check

_WORDS: dict[type[Instruction], Word] = {
    kind: word for word, kind in (*COMPUTATIONS.items(), *MESSAGE_WORDS.items(), *SHARDING.items())
}
_LEFT_TO_THE_USER = (ShareMetrics, ClipGrad, OptStep)


def dumps(plan: PlanData, *, compute_only: bool = False, waits: bool = False) -> str:
    """Return the file's text; equal plans give identical bytes.

    With `waits` each send and reduction is waited for, as torch requires since 2.15: a forward's send after the
    backward that depends on it, other sends at the end, a reduction at once.

    Raises `UnsoundError` for a plan that is not sound, `UsageError` for one that torch's runtime cannot express.
    """
    check(plan).raise_if_unsound()
    fault = _beyond_torch(plan)
    if fault:
        raise UsageError(f"torch's pipeline runtime cannot run this plan: {fault}")
    write = _computations if compute_only else _with_waits if waits else _with_communication
    return "".join(",".join(write(program)) + "\n" for program in plan.programs)


def left_out(plan: PlanData) -> Iterator[str]:
    """Yield the properties of a plan that its file does not contain, with the option that restores each on import."""
    if plan.mesh.size > plan.mesh.pp:
        yield f"the mesh; import it with --mesh {plan.mesh}"
    if plan.zero.stage:
        yield f"that replicas share out weights; import it with --zero {plan.zero.stage}"
    if plan.blocks_per_stage:
        yield f"that its stages have {listed(plan.blocks_per_stage)} blocks; a run of what is imported chooses itself"
    if plan.buckets_per_stage > 1:
        yield f"that a stage has {counted(plan.buckets_per_stage, 'bucket')}; what is imported has one"


def _computations(program: Sequence[Instruction]) -> Iterator[str]:
    return (_cell(i) for i in program if i.computes)


def _with_communication(program: Sequence[Instruction]) -> Iterator[str]:
    """Yield every action. torch divides gradients by the number of microbatches in REDUCE_GRAD, replicas or not."""
    reduced: dict[int, int] = {}
    for index, i in enumerate(program):
        for side in i.sides:
            if isinstance(side, Bwd | BwdWeight | AllReduceBucket | ReduceScatterBucket):
                reduced[side.stage] = index
    stage_at = {index: stage for stage, index in reduced.items()}
    for index, i in enumerate(program):
        if i.computes or isinstance(i, Message):
            yield _cell(i)
        elif isinstance(i, GatherParams | FreeParams):
            yield f"{i.stage}{_WORDS[type(i)].value}"
        if index in stage_at:
            yield f"{stage_at[index]}{Word.REDUCE_GRAD.value}"


def _with_waits(program: Sequence[Instruction]) -> Iterator[str]:
    """Yield every action, with the waits for sends and reductions."""
    pending = [i for i in program if isinstance(i, SendAct | SendGrad)]
    backwards = {side: i for i in program for side in i.sides if isinstance(side, Bwd | BwdInput)}
    behind: dict[str, list[str]] = {}
    for side, i in backwards.items():
        sent = [one for one in pending if isinstance(one, SendAct) and _unit(one) == _unit(side)]
        behind.setdefault(_cell(i), []).extend(map(_wait, sent))
        pending = [one for one in pending if one not in sent]
    for text in _with_communication(program):
        yield text
        yield from behind.get(text, ())
        if text.endswith(Word.REDUCE_GRAD.value):
            yield text.replace(Word.REDUCE_GRAD.value, Word.WAIT_REDUCE_GRAD.value)
    yield from map(_wait, pending)


def _unit(i: Compute | Message) -> tuple[int, int]:
    return i.stage, i.microbatch


def _wait(send: Message) -> str:
    word = Word.WAIT_SEND_FORWARD if isinstance(send, SendAct) else Word.WAIT_SEND_BACKWARD
    return f"{send.stage}{word.value}{send.microbatch}"


def _cell(i: Instruction) -> str:
    sides = (side for side in i.sides if isinstance(side, Compute | Message))
    return written(f"{side.stage}{_WORDS[type(side)].value}{side.microbatch}" for side in sides)


def _beyond_torch(plan: PlanData) -> str | None:
    """Return a feature of a sound plan that torch cannot express, or would compute wrongly; None if there is none."""
    last_stage = len(plan.stage_to_pp) - 1
    if plan.mode != "train":
        return "it only computes forward; torch's runtime refuses schedules without backwards"
    if plan.stage_to_part is not None or len(plan.routes) > 1:
        return "its microbatches go both ways; torch knows one route, from the first stage to the last"
    if plan.schedule.slices > 1:
        return f"it cuts microbatches into {counted(plan.schedule.slices, 'slice')}; torch computes them whole"
    if any(plan.recompute):
        return "it recomputes activations; torch's stages do that themselves, so leave it to their modules (checkpoint)"
    if plan.columns.are(HostCopy).any():
        return "it moves activations to the host's memory and back; torch has no word for that: compile without offload"
    if plan.layout.loans:
        return "it lends activations to other ranks; torch has no word for that: compile without lend"
    if plan.zero.stage in (1, 2):
        return (
            f"it shares out state over replicas (ZeRO-{plan.zero.stage}); torch's FSDP shares out weights as well (3)"
        )
    if plan.zero.shards_weights and plan.zero.every < plan.schedule.microbatches:
        return (
            f"it reduces gradients after every {counted(plan.zero.every, 'microbatch')} (ZeRO-3); torch does so once: "
            f"compile it with zero_every {plan.schedule.microbatches}"
        )
    if plan.tied:
        return (
            f"it adds up the gradients of tied weights, {', '.join(map(repr, plan.tied))}; torch has no word for that"
        )
    if plan.skips:
        return f"its stages exchange skips, {', '.join(map(repr, plan.skips))}; torch has no word for that"
    if len(plan.losses) > 1:
        return f"its stages {', '.join(map(str, plan.losses))} have losses; torch has one, on the last stage"
    idle = next((rank for rank in range(plan.mesh.pp) if rank not in plan.stage_to_pp), None)
    if idle is not None:
        return f"rank {idle} holds no stage; every rank of torch's holds one"
    computed = (side for i in plan.programs[plan.stage_to_pp[-1]] for side in i.sides)
    last = [side.microbatch for side in computed if isinstance(side, Fwd) and side.stage == last_stage]
    if last != sorted(last):
        return f"its last stage computes the microbatches in the order {last[:20]}; torch counts losses as they come"
    return _unknown(plan)


def _unknown(plan: PlanData) -> str | None:
    known = (*_WORDS, Overlap, AllReduceBucket, ReduceScatterBucket, *_LEFT_TO_THE_USER)
    for rank, program in enumerate(plan.programs):
        for index, i in enumerate(program):
            if not isinstance(i, known):
                return f"rank {rank} instruction {index}, {i}, has no word there"
    return None
