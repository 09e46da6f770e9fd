"""All members of a group in one process, of which one runs at a time: until it waits for the others.

    member 0   ─ runs ─▶ all-reduce  · · · · · · · · ·  ─ runs ─▶
    member 1              · · · · · ─ runs ─▶ all-reduce  · · · ·  ─ runs ─▶

Nothing leaves the process. Where members issue unlike collectives, or one of them ends, the others get an error.
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

from ..base import Group
from ..device import SEEDED, generators_lent, use_device
from .transport import LocalTransport
from .world import Awaited, LocalWorld

Result = TypeVar("Result")

_LONGEST_S = 1e6


@dataclass(frozen=True)
class EnteredModes:
    """Modes of functions and of operators, and hooks of saved tensors, that are entered on a thread."""

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
        """A context in which this thread has them too; their own `__enter__` is not called again."""
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


class _Turns(LocalWorld):
    """A world whose ranks pass a lock on where they wait."""

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
    """Call `work` with the group of `size` as each of its members has it, and return the results in their order.

    Raises the first error that a member raises; `StallError` where they issue unlike collectives.
    """
    world, results = _Turns(size, device), dict[int, Result]()
    records, modes = torch.is_grad_enabled(), EnteredModes.here()

    def run(index: int) -> None:
        transport = LocalTransport(world, index)
        with world.turn:
            try:
                if device.index is not None:
                    use_device(device, device.index)
                # one thread of torch's runs the backwards of a device: it must not wait for a member behind it
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
