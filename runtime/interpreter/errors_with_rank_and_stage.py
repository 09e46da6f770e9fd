"""Errors of user code, raised again with the place where they arose: rank, stage, block and module.

ValueError: no such token      ──▶      CodeError: rank 1 (pp=1), stage 2, block 5 (Layer), in its 'attn', a Attention:
                                    ValueError: no such token                         (raised from the ValueError)

A step that some ranks cannot begin raises on all ranks (`refuse_together`):

user code failed on some, not all, of the ranks that compute the same  ─▶ CodeError there; the other ranks wait until
                                                                          hang detection reports that those have ended
any other problem: a batch that no block takes, an unknown extra, …    ─▶ raised as it is; MisfitError on other ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quintsched.errors import CodeError, MisfitError, QuintschedError, UsageError, counted, listed_ranks
from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_set import Instruction
from quintsched.ir.mesh import Mesh
from quintsched.stalls.own_error_or_lost_peer import failed_in_code, message_of, said

from ..autograd.autograd_engine_call import run_backward
from ..blocks.failing_submodule_from_traceback import block_of, frames, place_of
from ..blocks.trees import TreeSpec
from ..comm import Group
from ..comm.host_collectives import ControlGroup, first_said, share_texts
from ..losses.save_and_restore_loss_state import tensors_with_rows
from ..losses.weighted_losses import WeighedLoss
from ..losses.weighted_metrics import WeighedMetric
from ..stage.stage_forward import StageForward
from ..step_setup.unit_samples import Units

_MOST_NAMED = 3


def with_location(
    error: BaseException, instruction: Instruction, index: int, rank: str, forwards: Mapping[int, StageForward]
) -> BaseException:
    """Return the exception to raise for an error in an instruction of a program, with rank, stage, block and module.

    Errors of this package, and those that arise in no stage, are returned as they are, with a note. `rank`: this
    rank's number and coordinates in words.
    """
    origin = _origin(error, instruction, forwards)
    if origin and not isinstance(error, QuintschedError):
        error = CodeError(f"{rank}, {origin}: {said(error)}{_advice(message_of(error))}")
    error.add_note(f"on {rank}, instruction {index}: {instruction}")
    return error


def rank_in_words(mesh: Mesh, rank: int) -> str:
    """Return a rank's number and mesh coordinates, in words."""
    return f"rank {rank} ({', '.join(f'{axis}={at}' for axis, at in mesh.coordinates(rank).items())})"


def call_user_function(
    name: str, function: WeighedLoss | WeighedMetric, output: Any, targets: Any, units: Units, unit: int, **more: Any
) -> Any:
    """Call a loss or metric on a unit's outputs and targets; raise `CodeError` for errors of user code.

    A `MisfitError` of this package is deferred: the function returns a placeholder, and all ranks raise it together
    when they agree on the loss. `more`: further keyword arguments of the function.
    """
    samples = len(units.samples[unit])
    try:
        return function(output, targets, samples=samples, **more)
    except MisfitError as error:
        return function.defer(error, output)
    except QuintschedError:
        raise
    except (Exception, SystemExit) as error:
        raise CodeError(
            f"{name} raised {said(error)}; it was given {TreeSpec.from_tree(output)}, and targets "
            f"{TreeSpec.from_tree(targets)}{_why_of_some(name, function.function, targets, samples, units)}"
        ) from error


def _why_of_some(name: str, function: Any, targets: Any, samples: int, units: Units) -> str:
    """Return a hint for a function that fails on a microbatch but expects the whole batch; "" if it was given that."""
    sizes = {units.num_samples, units.of_all} - {samples}
    if not sizes:
        return ""
    spec = TreeSpec.from_tree(targets)
    given = zip(spec.tree.paths, (tuple(tensor.shape) for tensor in spec.tensors), strict=True)
    wide = [f"targets{path} {shape}" for path, shape in given if sizes & {*shape[1:]}]
    found = [*tensors_with_rows(name, function, sizes), *wide][:_MOST_NAMED]
    named = f", and {' and '.join(found)} {'is' if len(found) == 1 else 'are'} for the whole batch" if found else ""
    return (
        f"; it is called for each microbatch, here with {samples} of this replica's "
        f"{counted(units.num_samples, 'sample')}{named}"
        ": give each sample what it needs as a target of its own, and no numbers or rows of other samples"
    )


def _origin(error: BaseException, instruction: Instruction, forwards: Mapping[int, StageForward]) -> str:
    """Return the stage and block that an error comes from, in words; "" if from none."""
    sides = [side for side in instruction.sides if isinstance(side, ins.Compute)]
    for side in sides:
        blocks = forwards[side.stage].blocks
        if (number := block_of(error, blocks)) is not None:
            return f"stage {side.stage}, {place_of(error, number, blocks[number])}"
    if sides and any(frame.f_code is run_backward.__code__ for frame in frames(error)):
        return f"the backward of stage {sides[-1].stage} ({', '.join(_names(forwards[sides[-1].stage]))})"
    return ""


def _names(forward: StageForward) -> list[str]:
    return [f"block {number}, a {type(block).__name__}" for number, block in forward.blocks.items()]


def _advice(message: str) -> str:
    if "in-place operation" in message or "inplace operation" in message:
        return (
            "; let the block change a copy: x = x.clone(), or build its module with inplace=False; where blocks pass "
            "on x and a view of it, pass on x, and let each take the view itself"
        )
    return ""


def refuse_together(problem: MisfitError | UsageError | None, world: Group, peers: Group, mesh: Mesh) -> None:
    """Raise, on all ranks, where some of them have a problem (collective over all).

    A rank whose own code failed, while a rank that computes the same has no problem, raises `CodeError`. Then the other
    ranks wait at a barrier that is meant never to complete: hang detection ends the wait when that rank is gone.

    Args:
        problem: this rank's; None: it has none.
        world: all ranks.
        peers: the ranks that compute the same as this one, which is among them; if it is the only one, all ranks count.
        mesh: names the ranks in messages.
    """
    if not first_said("" if problem is None else str(problem), world):
        return
    its = peers.ranks if peers.size > 1 else world.ranks
    mine = "" if problem is None else json.dumps([str(problem), failed_in_code(problem), list(its)])
    found = {rank: json.loads(text) for rank, text in zip(world.ranks, share_texts(world, mine), strict=True) if text}
    alone = [rank for rank, (_, in_code, its) in found.items() if in_code and any(peer not in found for peer in its)]
    rank = world.ranks[world.index]
    if rank in alone and problem is not None:
        who, others = rank_in_words(mesh, rank), "other ranks that compute the same did not fail"
        raise CodeError(f"{who}, {problem}; {others}") from problem.__cause__
    if alone:
        ControlGroup(world).barrier()  # not reached by ranks in `alone`
    raise problem or MisfitError(_words(found))


def _words(problems: dict[int, Sequence[str]]) -> str:
    """Return the message of the first rank with a problem, and the ranks with the same message."""
    words = next(iter(problems.values()))[0]
    return f"{listed_ranks([rank for rank, theirs in problems.items() if theirs[0] == words])}: {words}"
