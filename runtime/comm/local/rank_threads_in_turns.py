"""All members of a group as threads of one process, of which one runs at a time: until it waits for the others.

    member 0   ─ runs ─▶ all-reduce  · · · · · · · · ·  ─ runs ─▶
    member 1              · · · · · ─ runs ─▶ all-reduce  · · · ·  ─ runs ─▶

No other process takes part. Where members issue different collectives, or one of them ends, the others get an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatches

from ..device import use_device
from ..random_generators import SEEDED, generators_lent
from ..transport_interface import Group
from .in_process_transport import LocalTransport
from .rank_threads_and_deadlocks import Awaited, LocalWorld

Result = TypeVar("Result")

_LONGEST_S = 1e6


@dataclass(frozen=True)
class EnteredModes:
    """Function modes, dispatch modes and saved-tensor hooks that are active on a thread."""

    functions: tuple[Any, ...]
    operators: tuple[Any, ...]
    hooks: tuple[Any, ...]

    @classmethod
    def here(cls) -> EnteredModes:
        """Return those of this thread."""
        functions, operators = (
            overrides._get_current_function_mode_stack(),
            dispatches._get_current_dispatch_mode_stack(),
        )
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return cls(tuple(functions), tuple(operators), tuple(hooks or ()))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context that activates them on this thread too, without calling their `__enter__` again."""
        for mode in self.functions:
            overrides._push_mode(mode)
        for mode in self.operators:
            dispatches._push_mode(mode)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self.hooks) if self.hooks else nullcontext():
                yield
        finally:
            for _ in self.operators:
                dispatches._pop_mode()
            for _ in self.functions:
                overrides._pop_mode()


class _RanksInTurns(LocalWorld):
    """A world whose ranks pass on one lock whenever they wait."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device, _LONGEST_S)
        self.turn = threading.Lock()

    def wait_for(self, rank: int, awaited: Awaited) -> None:
        with generators_lent() if threading.get_ident() in SEEDED else nullcontext():
            self.turn.release()
            try:
                super().wait_for(rank, awaited)
            finally:
                self.turn.acquire()


def run_in_turns(size: int, device: torch.device, work: Callable[[Group], Result]) -> list[Result]:
    """Run `work` as each member of a group of `size`, one at a time, and return the results in member order.

    Raises the first error that a member raises; `StallError` where they issue different collectives.
    """
    world, results = _RanksInTurns(size, device), dict[int, Result]()
    records, modes = torch.is_grad_enabled(), EnteredModes.here()

    def run(index: int) -> None:
        transport = LocalTransport(world, index)
        with world.turn:
            try:
                if device.index is not None:
                    use_device(device, device.index)
                # a device's backwards share one thread of torch, which must not block on a later member
                serially = torch.autograd.set_multithreading_enabled(False)
                with torch.set_grad_enabled(records), serially, modes.entered():
                    results[index] = work(transport.world_group())
            except BaseException as error:
                world.abort(index, error)
            transport.close()

    members = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    if world.failure is not None:
        raise world.failure[1]
    return [results[index] for index in range(size)]
