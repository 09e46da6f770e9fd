"""Faults on one rank, at one place: injected into a rank's process before it runs a job.

kill, exit0, exit5, raise, stop, sleep         as it comes to an instruction, builds its model, or saves
skip_send, skip_recv                           a message is passed over; the program goes on
large, small, dtype, other                     a message is sent that does not fit, or as another microbatch's
odd                                            a setting of the job is another one than on all other ranks
cut                                            the link of its host is cut: by who made the hosts, when asked to
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import quintsched as qs
from quintsched.ir import instruction_set as ops

Trap = Callable[[Callable[[], None]], Callable[[], None]]
"""Decorator that makes a call one in which a fault may happen."""
Kind = Literal[
    "kill",
    "exit0",
    "exit5",
    "raise",
    "stop",
    "sleep",
    "skip_send",
    "skip_recv",
    "large",
    "small",
    "dtype",
    "other",
    "odd",
    "cut",
]
Phase = Literal["set-up", "warm-up", "steady", "cool-down", "reduction", "optimizer", "save"]

ENDS: tuple[Kind, ...] = ("kill", "exit0", "exit5", "raise")
STALLS: tuple[Kind, ...] = ("stop", "sleep")
SKIPS: tuple[Kind, ...] = ("skip_send", "skip_recv")
WRONGS: tuple[Kind, ...] = ("large", "small", "dtype", "other")
ODD = ("train.seed=1", "train.optimizer.lr=0.5", "train.clip=2.0", "model.options.depth=7")
"""Settings that differ on one rank; an injection's step selects one."""
HEARD_S, CUT_WAITS_S = 0.6, 10.0
"""Seconds that a rank stays where it is before its link is cut, so that this is reported, and the most it waits."""
PHASES: tuple[Phase, ...] = ("set-up", "warm-up", "steady", "cool-down", "reduction", "optimizer", "save")


@dataclass(frozen=True)
class Injection:
    """Injected fault: its kind, rank and phase, and the training step and instruction at which it happens."""

    kind: Kind
    rank: int
    phase: Phase
    step: int = 3
    index: int | None = None

    def fire(self, folder: Path) -> None:
        """Fail once, and write down when; returns only where a signal that stopped it was followed by one to go on."""
        if (folder / "fired").exists():
            return
        time.sleep(HEARD_S if self.kind == "cut" else 0.0)
        (folder / "fired").write_text(str(time.time()))
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind in ("exit0", "exit5"):
            os._exit(int(self.kind[-1]))
        elif self.kind == "raise":
            raise ValueError("injected")
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "cut":
            until = time.monotonic() + CUT_WAITS_S
            while not (folder / "cut").exists() and time.monotonic() < until:
                time.sleep(0.005)
        else:
            time.sleep(600)

    def install(self, folder: Path) -> None:
        """Have this process, a rank of a run, go wrong."""
        from quintsched.runtime.train.trainer import Trainer
        from quintsched.runtime.train.training_loop import TrainingLoop

        if int(os.environ["RANK"]) != self.rank:
            return
        if self.kind == "odd":
            self._install_in_job(folder)
        elif self.phase == "set-up":
            makes = Trainer._begin

            def make(trainer: Trainer, *arguments: Any, **settings: Any) -> None:
                self.fire(folder)
                makes(trainer, *arguments, **settings)

            Trainer._begin = make  # type: ignore[method-assign]
        elif self.phase == "save":
            saves = TrainingLoop._save

            def save(loop: TrainingLoop, **how: bool) -> None:
                if loop.progress.step >= self.step:
                    with loop._publisher.phase("save"):
                        self.fire(folder)
                saves(loop, **how)

            TrainingLoop._save = save  # type: ignore[method-assign]
        else:
            self._install_in_program(folder)

    @property
    def odd(self) -> str:
        """The setting of the job that is another one on this rank, with its value."""
        return ODD[self.step % len(ODD)]

    def _install_in_job(self, folder: Path) -> None:
        from quintsched.runtime.launch import run_arguments

        loads = run_arguments.load_job

        def load(path: str | Path, settings: Sequence[str] = ()) -> Any:
            (folder / "fired").write_text(str(time.time()))
            return loads(path, [*settings, self.odd])

        run_arguments.load_job = load

    def _install_in_program(self, folder: Path) -> None:
        from quintsched.runtime.interpreter.handler_table_and_loop import Interpreter

        binds = Interpreter._bind

        def bind(interpreter: Interpreter) -> list[tuple[int, int, int, Callable[[], None]]]:
            if not interpreter.state.flows.trains:
                return binds(interpreter)
            transport = interpreter.state.messages.transport
            trap = self._tampering(folder, transport) if self.kind in (*SKIPS, *WRONGS) else self._failing(folder)
            return [
                (place, order, index, trap(call) if index == self.index and order < 3 else call)
                for place, order, index, call in binds(interpreter)
            ]

        Interpreter._bind = bind  # type: ignore[method-assign]

    def _trapped(self, call: Callable[[], None], spring: Callable[[], object]) -> Callable[[], None]:
        """Return what calls, and springs the trap before the call of this fault's step."""
        calls = count(1)

        def run() -> None:
            if next(calls) == self.step:
                spring()
            call()

        return run

    def _failing(self, folder: Path) -> Trap:
        return lambda call: self._trapped(call, lambda: self.fire(folder))

    def _tampering(self, folder: Path, transport: object) -> Trap:
        """Return what has a call send or receive otherwise; what the transport binds from now on looks whether to."""
        from quintsched.runtime.comm import DoneWork

        active = [False]
        sender, receiver = transport._sender, transport._receiver  # type: ignore[attr-defined]

        def tampered_sender(peer: int, tag: int, label: Any) -> Callable[[Tensor], object]:
            send = sender(peer, tag, label)
            other = sender(peer, tag, replace(label, microbatch=label.microbatch + 1))

            def run(tensor: Tensor) -> object:
                if not active[0]:
                    return send(tensor)
                if self.kind == "skip_send":
                    return DoneWork()
                return (other if self.kind == "other" else send)(self._tamper(tensor))

            return run

        def tampered_receiver(*arguments: Any) -> Callable[[], object]:
            post = receiver(*arguments)
            return lambda: DoneWork() if active[0] and self.kind == "skip_recv" else post()

        transport._sender, transport._receiver = tampered_sender, tampered_receiver  # type: ignore[attr-defined]

        def begin() -> None:
            (folder / "fired").write_text(str(time.time()))
            active[0] = True

        def trap(call: Callable[[], None]) -> Callable[[], None]:
            trapped = self._trapped(call, begin)

            def run() -> None:
                try:
                    trapped()
                finally:
                    active[0] = False

            return run

        return trap

    def _tamper(self, tensor: Tensor) -> Tensor:
        if self.kind == "large":
            return torch.cat([tensor.flatten(), tensor.flatten()])
        if self.kind == "small":
            return tensor.flatten()[: tensor.numel() // 2].clone()
        if self.kind == "dtype":
            return tensor.view(torch.int32)
        return tensor

    @property
    def name(self) -> str:
        """Name in a table."""
        return f"{self.kind} on rank {self.rank} in {self.phase}"


def place_of(plan: qs.Plan, rank: int, phase: Phase, kind: Kind, nth: int = 0) -> int | None:
    """Return an instruction of a rank's program in a phase, at which a kind of fault can be; None where none is.

    Of several that are as good, it is the `nth`.
    """
    program = plan.programs[plan.mesh.pp_rank(rank)]
    wanted = _wanted(phase, kind)
    found = [index for index, one in enumerate(program) if isinstance(one, wanted)]
    if phase in ("warm-up", "steady", "cool-down"):
        first = next((i for i, one in enumerate(program) if isinstance(one, ops.Bwd | ops.BwdInput)), len(program))
        last = max((i for i, one in enumerate(program) if isinstance(one, ops.Fwd)), default=0)
        inside = {
            "warm-up": lambda i: i < first,
            "steady": lambda i: first <= i <= last,
            "cool-down": lambda i: i > last,
        }[phase]
        found = list(filter(inside, found))
    return found[nth % len(found)] if found else None


def _wanted(phase: Phase, kind: Kind) -> tuple[type[ops.Instruction], ...]:
    if kind == "skip_recv":
        return (ops.Recv,)
    if kind in ("skip_send", *WRONGS):
        return (ops.Send,)
    if phase == "reduction":
        return (ops.OnBucket, ops.ShareMetrics, ops.ClipGrad)
    return (ops.OptStep,) if phase == "optimizer" else (ops.Compute, ops.BwdWeight)


def all_injections(plan: qs.Plan, count: int, seed: int = 0, *, links: bool = False) -> list[Injection]:
    """Return `count` injections spread over kinds, ranks, phases and instructions; the same for the same plan.

    `links` says whether links can be cut here, which takes hosts.
    """
    anywhere: tuple[Kind, ...] = (*ENDS, *STALLS, *(["cut"] if links else []))
    kinds: tuple[Kind, ...] = (*ENDS, *STALLS, *SKIPS, *WRONGS, "odd", *anywhere[len(ENDS + STALLS) :])
    found: dict[Injection, None] = {}
    for nth in range(seed, seed + 64):
        for phase in PHASES:
            for number, kind in enumerate(kinds):
                rank = (nth + number) % plan.mesh.size
                if kind == "odd" and phase != "set-up":
                    continue
                if phase in ("set-up", "save"):
                    if kind == "odd":
                        found[Injection(kind, rank, phase, nth)] = None
                    if kind in anywhere:
                        found[Injection(kind, rank, phase, step=3)] = None
                    continue
                if phase in ("reduction", "optimizer") and kind in (*SKIPS, *WRONGS):
                    continue
                index = place_of(plan, rank, phase, kind, nth)
                if index is not None:
                    found[Injection(kind, rank, phase, 2 + nth % 3, index)] = None
    return list(found)[:count]


def as_arguments(injection: Injection) -> dict[str, object]:
    """Return what makes the injection again in another process."""
    return asdict(injection)
