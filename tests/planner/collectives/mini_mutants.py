"""Spelled-out collectives with faults, and a judge of them that shares no code with the proof but the steps.

A mutant is a small collective with 1 to 4 changes: steps swapped, moved, dropped, doubled, cut into halves or put
together, sums stored and stored chunks added, messages of another chunk or to another rank, on one end or on both.

`MiniJudge` carries a collective out under rendezvous, with numbers in the buffers: what the ranks bring, and garbage
wherever the kind promises nothing. Once they are counts (which rank's number is how often in it), once floats that
round, in which an all-reduce has to leave the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt

from quintsched.collectives import CollectivePlan, spell
from quintsched.collectives.collective_program import CollectiveStep, RecvChunk, SendChunk, SendRecv

Numbers = npt.NDArray[np.float64]
Programs = list[list[CollectiveStep]]


def doubling() -> CollectivePlan:
    """Recursive doubling over 4 ranks: all exchange all they have with a neighbour, then with one two ranks away."""
    programs = tuple(
        tuple(SendRecv(rank ^ far, chunk, rank ^ far, chunk, True) for chunk in range(2) for far in (1, 2))
        for rank in range(4)
    )
    return CollectivePlan("all_reduce", "tree", 4, 2, programs)


def through_a_root() -> CollectivePlan:
    """Rank 0 adds up what all others have, and gives it to them."""
    root = (*(RecvChunk(rank, 0, True) for rank in (1, 2)), *(SendChunk(rank, 0) for rank in (1, 2)))
    return CollectivePlan(
        "all_reduce", "tree", 3, 1, (root, *[(SendChunk(0, 0), RecvChunk(0, 0, False)) for _ in "12"])
    )


def everybody_to_everybody() -> CollectivePlan:
    """An all-gather in which each rank gives its part to each other one itself."""
    programs = tuple(
        tuple(SendRecv((rank + far) % 3, rank, (rank - far) % 3, (rank - far) % 3, False) for far in (1, 2))
        for rank in range(3)
    )
    return CollectivePlan("all_gather", "ring", 3, 3, programs)


def small_collectives() -> list[CollectivePlan]:
    """Rings of all kinds, trees, and some by hand."""
    rings = [
        spell(kind, "ring", size, size * rounds)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
        for size, rounds in ((2, 1), (2, 2), (3, 1), (4, 1))
    ]
    trees = [spell("all_reduce", "tree", size, chunks) for size, chunks in ((2, 2), (3, 2), (4, 4), (5, 2))]
    levels = [spell(kind, "two-level", 4, nodes=2) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
    return [*rings, *trees, *levels, doubling(), through_a_root(), everybody_to_everybody()]


def with_step(plan: CollectivePlan, rank: int, index: int, *steps: CollectiveStep) -> CollectivePlan:
    """Return the plan with other steps in the place of one."""
    program = plan.programs[rank]
    changed = (*program[:index], *steps, *program[index + 1 :])
    return replace(plan, programs=(*plan.programs[:rank], changed, *plan.programs[rank + 1 :]))


def mini_mutant(plan: CollectivePlan, random: Random) -> CollectivePlan:
    """Return the collective with 1 to 4 changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        programs = [list(program) for program in plan.programs]
        kind = plan.kind
        if any(programs):
            kind = random.choice(CHANGES)(plan, programs, random) or kind
        plan = replace(plan, kind=kind, programs=tuple(map(tuple, programs)))
    return plan


def _place(programs: Programs, random: Random) -> tuple[list[CollectiveStep], int]:
    program = random.choice([program for program in programs if program])
    return program, random.randrange(len(program))


def _swap(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    other = random.randrange(len(program))
    program[at], program[other] = program[other], program[at]


def _move(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    program.insert(random.randrange(len(program)), program.pop(at))


def _drop(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    del program[at]


def _double(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    program.insert(random.randrange(len(program) + 1), program[at])


def _add_or_store(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    step = program[at]
    if not isinstance(step, SendChunk):
        program[at] = replace(step, reduce=not step.reduce)


def _renumber(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    step, chunk, peer = program[at], random.randint(0, plan.chunks), random.randint(0, plan.size)
    match step:
        case SendRecv():
            names = [{"send_chunk": chunk}, {"recv_chunk": chunk}, {"to": peer}, {"source": peer}]
        case SendChunk():
            names = [{"chunk": chunk}, {"to": peer}]
        case RecvChunk():
            names = [{"chunk": chunk}, {"source": peer}]
    program[at] = replace(step, **random.choice(names))


def _halve_or_join(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    program, at = _place(programs, random)
    pair = program[at : at + 2]
    if isinstance(step := program[at], SendRecv):
        halves = [SendChunk(step.to, step.send_chunk), RecvChunk(step.source, step.recv_chunk, step.reduce)]
        program[at : at + 1] = random.sample(halves, 2)
    elif sorted(type(step).__name__ for step in pair) == ["RecvChunk", "SendChunk"]:
        send, recv = sorted(pair, key=lambda step: isinstance(step, RecvChunk))
        assert isinstance(send, SendChunk)
        assert isinstance(recv, RecvChunk)
        program[at : at + 2] = [SendRecv(send.to, send.chunk, recv.source, recv.chunk, recv.reduce)]


def _another_chunk(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    """Let a message carry another chunk, on both ends."""
    if plan.messages:
        sent, received = random.choice(plan.messages)
        chunk = random.randrange(plan.chunks)
        step = programs[sent.rank][sent.step]
        programs[sent.rank][sent.step] = (
            replace(step, send_chunk=chunk) if isinstance(step, SendRecv) else SendChunk(sent.peer, chunk)
        )
        step = programs[received.rank][received.step]
        programs[received.rank][received.step] = (
            replace(step, recv_chunk=chunk)
            if isinstance(step, SendRecv)
            else RecvChunk(received.peer, chunk, received.reduce)
        )


def _another_message(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    """Let one rank send another one a chunk more, anywhere."""
    source, target = random.sample(range(plan.size), 2)
    chunk = random.randrange(plan.chunks)
    programs[source].insert(random.randint(0, len(programs[source])), SendChunk(target, chunk))
    recv = RecvChunk(source, chunk, random.random() < 0.5)
    programs[target].insert(random.randint(0, len(programs[target])), recv)


def _another_kind(plan: CollectivePlan, programs: Programs, random: Random) -> str:
    return random.choice(("all_reduce", "reduce_scatter", "all_gather"))


CHANGES: tuple[Callable[[CollectivePlan, Programs, Random], str | None], ...] = (
    _swap,
    _move,
    _drop,
    _double,
    _add_or_store,
    _add_or_store,
    _renumber,
    _halve_or_join,
    _another_chunk,
    _another_chunk,
    _another_message,
    _another_kind,
)


class Execution:
    """A collective carried out on numbers: `held[r][c]` is what stands in chunk c of rank r in the end.

    `touched` holds all numbers that were sent and that something was added to.
    """

    def __init__(self, plan: CollectivePlan, held: list[list[Numbers]]) -> None:
        self.programs, self.held = plan.programs, held
        self.touched: list[Numbers] = []
        self.faults: list[str] = []
        self.counters = [0] * plan.size
        self.begun: list[tuple[list[str], Numbers | None]] = []
        if plan.chunks < 1 or len(plan.programs) != plan.size:
            self.faults.append("there is nothing to do, or nobody to do it")
            return
        self.begun = [self._begin(rank) for rank in range(plan.size)]
        while not self.faults and any(self._meet(rank) for rank in range(plan.size)):
            pass
        if any(at < len(program) for at, program in zip(self.counters, self.programs, strict=True)):
            self.faults.append("somebody waits for ever")

    def _step(self, rank: int) -> CollectiveStep | None:
        at = self.counters[rank]
        return self.programs[rank][at] if at < len(self.programs[rank]) else None

    def _begin(self, rank: int) -> tuple[list[str], Numbers | None]:
        """Come to a step: what of it is to be done, and what it sends."""
        step = self._step(rank)
        chunks = len(self.held[rank])
        if step is None:
            return [], None
        numbers = (getattr(step, name) for name in ("send_chunk", "recv_chunk", "chunk") if hasattr(step, name))
        if not all(0 <= chunk < chunks for chunk in numbers):
            self.faults.append("there is no such chunk")
            return [], None
        if isinstance(step, SendRecv):
            if step.send_chunk == step.recv_chunk and not step.reduce:
                self.faults.append("a chunk is written while it is sent")
            return ["send", "recv"], self.held[rank][step.send_chunk].copy()
        if isinstance(step, SendChunk):
            return ["send"], self.held[rank][step.chunk].copy()
        return ["recv"], None

    def _meet(self, rank: int) -> bool:
        """Let a rank's send meet its receive, if both have been come to."""
        step = self._step(rank)
        if not isinstance(step, SendRecv | SendChunk) or "send" not in self.begun[rank][0]:
            return False
        if not 0 <= step.to < len(self.programs) or step.to == rank:
            self.faults.append("there is nobody to send to")
            return False
        other = self._step(step.to)
        if not isinstance(other, SendRecv | RecvChunk) or "recv" not in self.begun[step.to][0] or other.source != rank:
            return False
        sent = step.send_chunk if isinstance(step, SendRecv) else step.chunk
        into = other.recv_chunk if isinstance(other, SendRecv) else other.chunk
        numbers = self.begun[rank][1]
        assert numbers is not None
        if sent != into:
            self.faults.append("chunks may be of different sizes")
            return False
        self.touched.append(numbers)
        there = self.held[step.to][into]
        self.touched += [there.copy(), there + numbers] if other.reduce else []
        self.held[step.to][into] = there + numbers if other.reduce else numbers.copy()
        for end, half in ((rank, "send"), (step.to, "recv")):
            self.begun[end][0].remove(half)
            if not self.begun[end][0]:
                self.counters[end] += 1
                self.begun[end] = self._begin(end)
        return True


class MiniJudge:
    """Whether a collective leaves what its kind promises (`right`), and never touches what it must not (`careful`)."""

    def __init__(self, plan: CollectivePlan, seed: int = 0) -> None:
        self.plan = plan
        self.right = self.careful = False
        if plan.kind != "all_reduce" and plan.chunks % plan.size:
            return
        counts = self._executed(lambda rank, brings: np.eye(2 * plan.size)[rank + (0 if brings else plan.size)])
        generator = np.random.default_rng(seed)
        floats = self._executed(lambda rank, brings: generator.normal(size=16) * 10.0 ** generator.integers(-3, 4, 16))
        self.careful = all(not numbers[plan.size :].any() and not (numbers > 1).any() for numbers in counts[0].touched)
        self.right = all(
            not run.faults and self._keeps_its_promise(run.held, before) for run, before in (counts, floats)
        )

    def _executed(self, draw: Callable[[int, bool], Numbers]) -> tuple[Execution, list[list[Numbers]]]:
        plan = self.plan
        first = [[draw(rank, self._brings(rank, chunk)) for chunk in range(plan.chunks)] for rank in range(plan.size)]
        return Execution(plan, [list(chunks) for chunks in first]), first

    def _brings(self, rank: int, chunk: int) -> bool:
        return self.plan.kind != "all_gather" or self._owner(chunk) == rank

    def _owner(self, chunk: int) -> int:
        return chunk // (self.plan.chunks // self.plan.size)

    def _keeps_its_promise(self, held: list[list[Numbers]], first: list[list[Numbers]]) -> bool:
        plan = self.plan
        for chunk in range(plan.chunks):
            column = [held[rank][chunk] for rank in range(plan.size)]
            if plan.kind == "all_gather":
                wanted = first[self._owner(chunk)][chunk]
            else:
                wanted = np.sum([first[rank][chunk] for rank in range(plan.size)], axis=0)
            if plan.kind == "reduce_scatter":
                column = [column[self._owner(chunk)]]
            if not all(np.allclose(found, wanted, rtol=1e-9, atol=1e-9) for found in column):
                return False
            if not all(np.array_equal(found, column[0]) for found in column):
                return False
        return True
