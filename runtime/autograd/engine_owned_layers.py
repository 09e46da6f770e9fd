"""Layers and weights that an engine has taken over: classes that it replaces in place, and its hold on weights.

nn.Dropout ──engine made──▶ KeyedDropout(TakenOver, nn.Dropout) ──given back──▶ nn.Dropout
weight     ──engine made──▶ Hold of this engine    ──another made──▶ Hold of that one; this one can do no step any more
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import current_thread
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class TakenOver(nn.Module):
    """First base of a class that replaces its second base in place: name, repr, copies and pickles are that one's.

    Attributes that the class annotates are the engine's.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if _replaced(cls):
            cls.__name__ = cls.__qualname__ = _replaced(cls)[0].__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = next(kind for kind in type(self).__mro__ if _replaced(kind))
        return (
            object.__new__,
            _replaced(kind),
            {k: v for k, v in self.__dict__.items() if k not in kind.__annotations__},
        )


def _replaced(kind: type) -> tuple[type, ...]:
    """Return the class that a class replaces, as a tuple; () for others, such as its subclasses."""
    return kind.__bases__[1:] if TakenOver in kind.__bases__ else ()


class Hold:
    """A rank's hold on the weights of its blocks, until its engine is closed, or another one is made of the blocks.

    Attributes:
        trains: whether the engine steps the weights; one that runs forwards alone leaves that to others.
        ended: why the engine can do no step any more; "": it can.
        undo: functions that are called then.
    """

    def __init__(self, *, trains: bool) -> None:
        self._thread, self.ended, self.undo = ref(current_thread()), "", list[Callable[[], object]]()
        self.trains = trains

    def take(self, weights: Iterable[Tensor]) -> None:
        """Take weights that no other hold has."""
        _holds.update(dict.fromkeys(weights, ref(self)))

    def end(self, why: str) -> None:
        """End it, once."""
        for undo in () if self.ended else self.undo:
            undo()
        self.ended = self.ended or why

    @property
    def is_of_other_rank(self) -> bool:
        """Whether another rank of this process has it: each has its thread."""
        thread = self._thread()
        return thread is not None and thread is not current_thread() and thread.is_alive()


_holds = WeakTensorKeyDictionary()
"""Weights, and references to the holds on them."""


def hold_on(weight: Tensor) -> Hold | None:
    """Return the latest hold on a weight; None: there is none."""
    found: Callable[[], Hold | None] = _holds.get(weight, bool)
    return found() or None


def holds_on(module: nn.Module) -> list[Hold]:
    """Return the holds on weights of a module."""
    return [hold for hold in dict.fromkeys(map(hold_on, module.parameters())) if hold is not None]


def take_back(module: nn.Module) -> None:
    """End the holds of this rank's engines on a module, and give its layers their own classes again."""
    holds = holds_on(module)
    if any(hold.is_of_other_rank for hold in holds):
        return
    for hold in holds:
        hold.end(
            "another engine has been made of this one's blocks since; use that, engine.evaluate for forwards alone"
        )
    for layer in module.modules():
        kind = type(layer)
        for own in _replaced(kind):
            layer.__class__ = own
            for name in kind.__annotations__:
                layer.__dict__.pop(name, None)
