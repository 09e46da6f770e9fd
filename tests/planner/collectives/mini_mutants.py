"""Spelled-out collectives with faults, and a judge of them that shares no code with the proof but the steps.

A mutant is a small collective with 1 to 4 changes: steps swapped, moved, dropped, doubled, cut into halves or put
together, sums stored and stored chunks added, messages of another chunk or to another rank, on one end or on both.

`MiniJudge` carries a collective out under rendezvous, with numbers in the buffers: what the ranks bring, and garbage
wherever the kind promises nothing. Once they are counts (which rank's number is how often in it), once floats that
round, in which an all-reduce has to leave the same bits on all ranks.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random

import numpy as np
import numpy.typing as npt

from quintsched.collectives import CollectivePlan, spell
from quintsched.collectives.collective_program import CollectiveStep, RecvChunk, SendChunk, SendRecv

Numbers = npt.NDArray[np.float64]
Programs = list[list[CollectiveStep]]
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def halves(step: CollectiveStep) -> tuple[SendChunk | None, RecvChunk | None]:
    """Return what a step sends, and what it receives."""
    if isinstance(step, SendRecv):
        return SendChunk(step.to, step.send_chunk), RecvChunk(step.source, step.recv_chunk, step.reduce)
    return (step, None) if isinstance(step, SendChunk) else (None, step)


def joined(send: SendChunk | None, recv: RecvChunk | None) -> CollectiveStep:
    if send is None or recv is None:
        return send or recv
    return SendRecv(send.to, send.chunk, recv.source, recv.chunk, recv.reduce)


def doubling() -> CollectivePlan:
    """Recursive doubling over 4 ranks: all exchange all they have with a neighbour, then with one two ranks away."""
    programs = tuple(
        tuple(SendRecv(rank ^ far, chunk, rank ^ far, chunk, True) for chunk in range(2) for far in (1, 2))
        for rank in range(4)
    )
    return CollectivePlan("all_reduce", "tree", 4, 2, programs)


def small_collectives() -> list[CollectivePlan]:
    """Rings of all kinds, trees, and one by hand."""
    rings = [
        spell(kind, "ring", size, size * rounds) for kind in KINDS for size, rounds in ((2, 1), (2, 2), (3, 1), (4, 1))
    ]
    trees = [spell("all_reduce", "tree", size, chunks) for size, chunks in ((2, 2), (3, 2), (4, 4), (5, 2))]
    levels = [spell(kind, "two-level", 4, nodes=2) for kind in KINDS]
    return [*rings, *trees, *levels, doubling()]


def with_step(plan: CollectivePlan, rank: int, index: int, *steps: CollectiveStep) -> CollectivePlan:
    """Return the plan with other steps in the place of one."""
    program = plan.programs[rank]
    changed = (*program[:index], *steps, *program[index + 1 :])
    return replace(plan, programs=(*plan.programs[:rank], changed, *plan.programs[rank + 1 :]))


def mini_mutant(plan: CollectivePlan, random: Random) -> CollectivePlan:
    """Return the collective with 1 to 4 changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        plan = _changed(plan, random) if any(plan.programs) else plan
    return plan


CHANGES = (
    *("swap", "move", "drop", "double", "add or store", "add or store", "renumber", "halve or join"),
    *("another chunk", "another chunk", "another message", "another kind"),
)


def _changed(plan: CollectivePlan, random: Random) -> CollectivePlan:
    programs, kind = [list(program) for program in plan.programs], plan.kind
    program = random.choice([program for program in programs if program])
    at, other = random.randrange(len(program)), random.randrange(len(program))
    step = program[at]
    match random.choice(CHANGES):
        case "swap":
            program[at], program[other] = program[other], step
        case "move":
            program.insert(other, program.pop(at))
        case "drop":
            del program[at]
        case "double":
            program.insert(random.randrange(len(program) + 1), step)
        case "add or store" if not isinstance(step, SendChunk):
            program[at] = replace(step, reduce=not step.reduce)
        case "renumber":
            name = random.choice([field.name for field in fields(step) if field.name != "reduce"])
            most = plan.chunks if "chunk" in name else plan.size
            program[at] = replace(step, **{name: random.randint(0, most)})
        case "halve or join":
            _halve_or_join(program, at, random)
        case "another chunk" if plan.messages:
            _carry_another_chunk(plan, programs, random)
        case "another message":
            _add_a_message(plan, programs, random)
        case "another kind":
            kind = random.choice(KINDS)
    return replace(plan, kind=kind, programs=tuple(map(tuple, programs)))


def _halve_or_join(program: list[CollectiveStep], at: int, random: Random) -> None:
    pair = sorted(program[at : at + 2], key=lambda step: isinstance(step, RecvChunk))
    if isinstance(program[at], SendRecv):
        program[at : at + 1] = random.sample(halves(program[at]), 2)
    elif [*map(type, pair)] == [SendChunk, RecvChunk]:
        program[at : at + 2] = [joined(*pair)]


def _carry_another_chunk(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    """Let a message carry another chunk, on both ends."""
    sent, received = random.choice(plan.messages)
    chunk = random.randrange(plan.chunks)
    send, recv = halves(programs[sent.rank][sent.step])
    programs[sent.rank][sent.step] = joined(replace(send, chunk=chunk), recv)
    send, recv = halves(programs[received.rank][received.step])
    programs[received.rank][received.step] = joined(send, replace(recv, chunk=chunk))


def _add_a_message(plan: CollectivePlan, programs: Programs, random: Random) -> None:
    """Let one rank send another one a chunk more, anywhere."""
    source, target = random.sample(range(plan.size), 2)
    chunk = random.randrange(plan.chunks)
    programs[source].insert(random.randint(0, len(programs[source])), SendChunk(target, chunk))
    recv = RecvChunk(source, chunk, random.random() < 0.5)
    programs[target].insert(random.randint(0, len(programs[target])), recv)


class Execution:
    """A collective carried out on numbers: `held[r][c]` is what stands in chunk c of rank r in the end.

    `touched` holds all numbers that were sent and that something was added to.
    """

    def __init__(self, plan: CollectivePlan, held: list[list[Numbers]]) -> None:
        self.programs, self.held = plan.programs, held
        self.touched: list[Numbers] = []
        self.faults: list[str] = []
        self.counters = [0] * plan.size
        if plan.chunks < 1 or len(plan.programs) != plan.size:
            self.faults.append("there is nothing to do, or nobody to do it")
            return
        self.begun = [self._begin(rank) for rank in range(plan.size)]
        while not self.faults and any(self._meet(rank) for rank in range(plan.size)):
            pass
        if any(at < len(program) for at, program in zip(self.counters, self.programs, strict=True)):
            self.faults.append("somebody waits for ever")

    def _begin(self, rank: int) -> tuple[SendChunk | None, RecvChunk | None, Numbers | None]:
        """Come to a step: its halves, which are to be done, and the numbers that it sends."""
        at, program = self.counters[rank], self.programs[rank]
        send, recv = halves(program[at]) if at < len(program) else (None, None)
        if not all(0 <= half.chunk < len(self.held[rank]) for half in (send, recv) if half):
            self.faults.append("there is no such chunk")
            return None, None, None
        if send and recv and send.chunk == recv.chunk and not recv.reduce:
            self.faults.append("a chunk is written while it is sent")
        return send, recv, self.held[rank][send.chunk].copy() if send else None

    def _meet(self, rank: int) -> bool:
        """Let a rank's send meet its receive, if both have been come to."""
        send, own, numbers = self.begun[rank]
        if send is None:
            return False
        if not 0 <= send.to < len(self.programs) or send.to == rank:
            self.faults.append("there is nobody to send to")
            return False
        back, recv, others = self.begun[send.to]
        if recv is None or recv.source != rank:
            return False
        if send.chunk != recv.chunk:
            self.faults.append("chunks may be of different sizes")
            return False
        there = self.held[send.to][recv.chunk]
        self.touched += [numbers, *([there.copy(), there + numbers] if recv.reduce else [])]
        self.held[send.to][recv.chunk] = there + numbers if recv.reduce else numbers.copy()
        for end, left in ((rank, (None, own, numbers)), (send.to, (back, None, others))):
            self.begun[end] = left
            if left[:2] == (None, None):
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
