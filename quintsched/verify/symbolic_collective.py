"""Symbolic run of a spelled-out collective, on random numbers modulo a prime, compared with the result of its kind.

    before   every rank has a number in every chunk: its contribution, or arbitrary old contents
    after    all-reduce, reduce-scatter: the sum over ranks       all-gather: the number of the chunk's owner

Sends never block, and a channel delivers in order, as in `symbolic_run`. Only the steps are shared with the proof of
collectives; the order of additions is not checked here.
"""

from __future__ import annotations

import random
from collections import deque

from quintsched.collectives.collective_program import CollectiveProgram, CollectiveStep, RecvChunk, SendChunk, SendRecv
from quintsched.verify.algebraic_training_model import PRIME

ChunkNumbers = list[list[int]]


def broken_promise(plan: CollectiveProgram, seed: int = 0) -> str | None:
    """Run a collective; return the fault of its result, or None if the result is right."""
    draw = random.Random(seed)
    before = [[draw.randrange(PRIME) for _ in range(plan.chunks)] for _ in range(plan.size)]
    if plan.chunks < 1 or len(plan.programs) != plan.size or not _names_what_is_there(plan):
        return "it names a rank or a chunk that is not there"
    after = _run(plan, [list(chunks) for chunks in before])
    if after is None:
        return "a rank waits for ever"
    for rank in range(plan.size):
        for chunk in range(plan.chunks):
            owner = plan.owner(chunk)
            if plan.kind == "reduce_scatter" and owner != rank:
                continue
            total = sum(numbers[chunk] for numbers in before) % PRIME
            if after[rank][chunk] != (before[owner][chunk] if plan.kind == "all_gather" else total):
                return f"rank {rank} ends with something else in chunk {chunk} than {plan.kind} promises"
    return None


def _names_what_is_there(plan: CollectiveProgram) -> bool:
    halves = (half for halves in plan.halves for half in halves)
    return all(0 <= half.peer < plan.size and 0 <= half.chunk < plan.chunks for half in halves)


def _run(plan: CollectiveProgram, held: ChunkNumbers) -> ChunkNumbers | None:
    """Execute all steps, each rank's send of a step before its receive; None if some can never run."""
    wires: dict[tuple[int, int], deque[int]] = {}
    programs = [iter([end for step in program for end in _halves(step)]) for program in plan.programs]
    waiting = [next(program, None) for program in programs]
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(programs):
            while (end := waiting[rank]) is not None and _takes(end, rank, held[rank], wires):
                waiting[rank] = next(program, None)
                moving = True
    return held if not any(waiting) and not any(wires.values()) else None


def _halves(step: CollectiveStep) -> tuple[SendChunk | RecvChunk, ...]:
    if isinstance(step, SendRecv):
        return SendChunk(step.to, step.send_chunk), RecvChunk(step.source, step.recv_chunk, step.reduce)
    return (step,)


def _takes(end: SendChunk | RecvChunk, rank: int, chunks: list[int], wires: dict[tuple[int, int], deque[int]]) -> bool:
    """Execute a send, or a receive if a message has arrived; return whether it was executed."""
    if isinstance(end, SendChunk):
        wires.setdefault((rank, end.to), deque()).append(chunks[end.chunk])
        return True
    wire = wires.get((end.source, rank))
    if not wire:
        return False
    chunks[end.chunk] = (wire.popleft() + (chunks[end.chunk] if end.reduce else 0)) % PRIME
    return True
