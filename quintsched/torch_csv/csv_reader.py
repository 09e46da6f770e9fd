"""Import of a schedule file: from its cells to a proved plan.

The placement of stages follows from the ranks that compute them. The proof is the same as for every plan; its findings
are also reported as positions in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quintsched.errors import UnsoundError, UsageError, counted
from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.instruction_set import (
    NEEDS_WEIGHTS,
    AllReduceBucket,
    FreeParams,
    GatherParams,
    Instruction,
    Overlap,
    RecvGrad,
    ReduceScatterBucket,
    SendAct,
)
from quintsched.ir.layout import Route
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import PlanData, ScheduleSpec
from quintsched.ir.rank_programs import Programs
from quintsched.ir.zero_setting import Zero
from quintsched.passes import TRAIN_PASSES, lower
from quintsched.plan import Plan
from quintsched.torch_csv.csv_cells import CsvCell, CsvCells, by_place, read_cells, run_side_by_side, written
from quintsched.torch_csv.csv_vocabulary import COMPUTATIONS, MESSAGE_WORDS, SHARDING, WAITS, Word
from quintsched.verify.soundness import Verdict, check, check_order
from quintsched.verify.wellformed import zero_faults

MOST_PLACES = 20
NO_RANK = -1


@dataclass(frozen=True)
class Imported:
    """Proved plan read from a file; `notes` lists the parts of the file that it leaves out."""

    verdict: Verdict
    notes: tuple[str, ...]

    @cached_property
    def plan(self) -> Plan:
        """Plan of the verdict."""
        return Plan.of(self.verdict.plan)


def loads(
    text: str,
    *,
    mesh: Mesh | str | None = None,
    zero: int = 0,
    profile: str = "channel",
    name: str = "torch-csv",
) -> Imported:
    """Read a schedule file and prove its plan.

    Args:
        text: the file.
        mesh: mesh of the plan; its pp is the number of lines. None: pipeline ranks only, as a note states.
        zero: ZeRO stage; with 3, the file's `UNSHARD` and `RESHARD` determine when weights are gathered and freed.
        profile: transport profile under which the plan must be free of deadlock.
        name: name of the plan's schedule.

    Raises:
        UsageError: a mesh that does not fit, an unknown profile.
        InputError: a fault of the file, with its line and cell.
        UnsoundError: a plan that is not sound; the message is the counter-example, with the cells concerned.
    """
    find_profile(profile)
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    cells = read_cells(text)
    lines = cells[-1].rank + 1
    if mesh is not None and mesh.pp != lines:
        raise UsageError(
            f"the mesh {mesh} has {counted(mesh.pp, 'pipeline rank')}, but the file has {counted(lines, 'line')}, one "
            "for each"
        )
    assumed = (
        [] if mesh else [f"no mesh is given: the plan has no replicas; for two of them write mesh dp=2,pp={lines}"]
    )
    mesh = mesh or Mesh(pp=lines)
    shared = _zero(zero, mesh)
    kept = _words_kept(cells, shared)
    plan = _draft([cell for cell in cells if cell.word in kept], mesh, name, shared)
    if MESSAGE_WORDS.keys().isdisjoint(kept):
        _raise_if_unsound(check_order(plan), cells)
    plan = lower(plan, [step for step in TRAIN_PASSES if not _already_done(step.name, kept)])
    verdict = check(plan, profile=profile)
    _raise_if_unsound(verdict, cells)
    return Imported(verdict, (*_notes(cells, kept, plan), *assumed))


def _words_kept(cells: CsvCells, zero: Zero) -> set[Word]:
    """Return the words of the file that the plan keeps; if passes place messages, they place all but computations.

    One rank has no messages: its file may be complete without them.
    """
    words = {cell.word for cell in cells}.difference(WAITS)
    if cells[-1].rank and not words & MESSAGE_WORDS.keys():
        return words & COMPUTATIONS.keys()
    return words if zero.shards_weights else words.difference(SHARDING)


def _already_done(step: str, kept: set[Word]) -> bool:
    """Return whether the file contains the instructions that a pass would add."""
    words: dict[str, Iterable[Word]] = {
        "place-messages": MESSAGE_WORDS,
        "gather-params": SHARDING,
        "reduce-buckets": (Word.REDUCE_GRAD,),
    }
    return not kept.isdisjoint(words.get(step, ()))


def _draft(cells: Sequence[CsvCell], mesh: Mesh, name: str, zero: Zero) -> PlanData:
    """Return the plan with the file's instructions only; torch reduces a stage's gradients once."""
    home = {cell.stage: cell.rank for cell in cells}
    stage_to_pp = tuple(home[stage] for stage in range(len(home)))
    microbatches = len({cell.microbatch for cell in cells if cell.word is Word.FORWARD})
    draft = PlanData(
        mode="train",
        schedule=ScheduleSpec(name, microbatches, chunks=max(Counter(stage_to_pp).values())),
        mesh=mesh,
        stage_to_pp=stage_to_pp,
        routes=(Route(tuple(range(len(home))), tuple(range(microbatches))),),
        buckets_per_stage=1,
        programs=Programs.from_programs([]),
        zero=replace(zero, every=microbatches) if zero.shards_gradients else zero,
    )
    programs: list[list[Instruction]] = [[] for _ in range(mesh.pp)]
    for found in by_place(cells):
        programs[found[0].rank] += _instructions(found, draft)
    return replace(draft, programs=Programs.from_programs(map(_with_last_frees, programs)))


def _zero(stage: int, mesh: Mesh) -> Zero:
    """Return the ZeRO setting; raises `UsageError`."""
    zero = Zero(stage)
    for fault in zero_faults(zero, mesh, "train"):
        raise UsageError(fault)
    return zero


def _with_last_frees(program: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yield a program with a `FreeParams` after the last use of weights that the file leaves gathered, as FSDP does."""
    gathered = Counter(i.stage for i in program if isinstance(i, GatherParams))
    gathered.subtract(i.stage for i in program if isinstance(i, FreeParams))
    sides = ((index, side) for index, i in enumerate(program) for side in i.sides)
    last_use = {side.stage: index for index, side in sides if isinstance(side, NEEDS_WEIGHTS)}
    frees = {last_use[stage]: stage for stage, count in gathered.items() if count == 1 and stage in last_use}
    for index, i in enumerate(program):
        yield i
        if index in frees:
            yield FreeParams(frees[index])


def _instructions(found: CsvCells, plan: PlanData) -> Sequence[Instruction]:
    """Return the instructions of a cell."""
    if not run_side_by_side(found):
        return [instruction for cell in found for instruction in _of_action(cell, plan)]
    forward, backward = ((cell.stage, cell.microbatch or 0) for cell in sorted(found, key=_forward_first))
    return [Overlap(forward, backward)]


def _forward_first(cell: CsvCell) -> bool:
    return cell.word is not Word.FORWARD


def _of_action(cell: CsvCell, plan: PlanData) -> Sequence[Instruction]:
    """Return the instructions of an action: one, or for reductions one per bucket that replicas sum."""
    stage, microbatch = cell.stage, cell.microbatch or 0
    if cell.word in COMPUTATIONS:
        return [COMPUTATIONS[cell.word](stage, microbatch)]
    if cell.word in MESSAGE_WORDS:
        kind, at = MESSAGE_WORDS[cell.word], plan.stage_to_pp
        other = stage + 1 if issubclass(kind, SendAct | RecvGrad) else stage - 1
        return [kind(stage, microbatch, at[other] if 0 <= other < len(at) else NO_RANK)]
    if cell.word in SHARDING:
        return [SHARDING[cell.word](stage)]
    if plan.zero.shards_optimizer:
        return [ReduceScatterBucket(stage, bucket, axes, part=0) for bucket, axes in plan.layout.reductions]
    return [AllReduceBucket(stage, bucket, axes) for bucket, axes in plan.layout.reductions]


def _raise_if_unsound(verdict: Verdict, cells: CsvCells) -> None:
    """Raise `UnsoundError` with the counter-example and the cells concerned, unless the verdict is sound."""
    if verdict.sound:
        return
    cell_of = {instruction: found for found in by_place(cells) for instruction in _instructions(found, verdict.plan)}
    programs = verdict.plan.programs
    marked = [programs[f.rank][f.index] for f in verdict.findings if f.rank is not None and f.index is not None]
    found = [*dict.fromkeys(cell_of[instruction] for instruction in marked if instruction in cell_of)]
    lines = [f"  {cell[0].place}: {written(cell)}" for cell in found[:MOST_PLACES]]
    raise UnsoundError("\n".join([verdict.explain(), *(["in the file:"] if lines else []), *lines]))


def _notes(cells: CsvCells, kept: set[Word], plan: PlanData) -> Iterator[str]:
    apart = [found for found in by_place(cells) if len(found) > 1 and not run_side_by_side(found)]
    if apart:
        yield (
            f"took {len(apart)} OVERLAP_F_B one part after the other, the first in {apart[0][0].place}: side by side "
            "run a forward and a whole backward of another microbatch or stage"
        )
    if waits := [cell for cell in cells if cell.word in WAITS]:
        yield f"left out {len(waits)} waits, the first in {waits[0].place}: a run waits where it must itself"
    sharding = [cell for cell in cells if cell.word in SHARDING]
    dropped = [cell for cell in sharding if cell.word not in kept]
    if dropped:
        why = "the plan says itself when weights are gathered"
        if not plan.zero.shards_weights:
            why = "in this plan a stage keeps its full weights" + (
                "; zero 3 keeps them" if plan.mesh.replica_axes else ""
            )
        yield f"left out {len(dropped)} UNSHARD and RESHARD, the first in {dropped[0].place}: {why}"
    added = sum(isinstance(i, FreeParams) for program in plan.programs for i in program)
    added -= sum(cell.word is Word.RESHARD for cell in sharding)
    if Word.UNSHARD in kept and added > 0:
        yield f"added {added} RESHARD, after the last use of weights that the file leaves to FSDP to free"
