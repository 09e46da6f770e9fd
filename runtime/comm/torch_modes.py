"""Torch modes (grad, inference, autocast, …) that user code runs under, and a check that it restores them.

with torch.no_grad():            Modes.now() there differs from Modes.now() around it
    t = self.teacher(x)          with modes.entered(): …   the same operations under the same modes, elsewhere

torch.set_grad_enabled(False)    modes_kept() restores them after a block that leaves them switched off
h = self.layers[0](x)
torch.set_grad_enabled(True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quintsched.errors import MisfitError

from .device import device_kinds

_KINDS = device_kinds()
_NO_CASTS: tuple[tuple[str, torch.dtype | None], ...] = tuple(dict.fromkeys(_KINDS).items())


class Modes(NamedTuple):
    """The torch modes that are active at some point of code; None: the same as outside.

    Attributes:
        grad: whether autograd records.
        inference: whether inference mode is on.
        autocast: device types, each with its autocast dtype, None: off.
        dtype: the default floating-point dtype.
        deterministic: whether deterministic algorithms are required, and whether others only warn.
    """

    grad: bool | None
    inference: bool | None
    autocast: tuple[tuple[str, torch.dtype | None], ...] | None
    dtype: torch.dtype | None
    deterministic: tuple[bool, bool] | None

    @classmethod
    def now(cls) -> Modes:
        """Return the modes that are active here."""
        casts = _casts_now() if _is_any_cast() else _NO_CASTS
        return _modes((_is_grad(), _is_inference(), casts, _default_dtype(), (_is_strict(), _only_warns())))

    def apart_from(self, around: Modes) -> Modes | None:
        """Return these modes with None where they equal those `around`; None where all are equal."""
        if self == around:
            return None
        same: dict[str, Any] = {name: None for name in self._fields if getattr(self, name) == getattr(around, name)}
        return self._replace(**same)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which these modes are active, whatever is active outside."""
        around = Modes.now()
        with ExitStack() as stack:
            if self.inference not in (None, around.inference):
                stack.enter_context(torch.inference_mode(self.inference))
            for kind, dtype in self.autocast or ():
                if (kind, dtype) not in (around.autocast or ()):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            if self.grad not in (None, torch.is_grad_enabled()):
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.dtype not in (None, around.dtype) or self.deterministic not in (None, around.deterministic):
                stack.callback(around._set_of_process)
                self._set_of_process()
            yield

    def require_kept(self, what: str) -> None:
        """Raise `ModesLeftError` where other modes are active now, after `what` has run."""
        left = Modes.now().apart_from(self)
        if left is not None:
            names = [words for name, words in _WORDS.items() if getattr(left, name) is not None]
            raise ModesLeftError(
                f"{what} leaves modes of torch otherwise than it found them ({', '.join(names)}), and what runs behind "
                "it would run so: switch by a context, `with torch.no_grad(): …`, or back before the end, "
                "`torch.set_grad_enabled(was)`"
            )

    def put_back(self) -> None:
        """Restore these modes; except inference mode, which ends with its context."""
        if self.grad not in (None, torch.is_grad_enabled()):  # a switch would count as one of the block: `GradSwitches`
            torch.set_grad_enabled(self.grad)
        for kind, dtype in self.autocast or ():
            torch.set_autocast_enabled(kind, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(kind, dtype)
        self._set_of_process()

    def _set_of_process(self) -> None:
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        if self.deterministic is not None:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])


_modes: Callable[[tuple[Any, ...]], Modes] = partial(tuple.__new__, Modes)
_is_strict: Callable[[], bool] = torch._C._get_deterministic_algorithms
_is_any_cast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_is_grad, _is_inference, _default_dtype = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
)
_only_warns: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only

_WORDS = {
    "grad": "gradients",
    "inference": "inference mode",
    "autocast": "autocast",
    "dtype": "the default dtype",
    "deterministic": "deterministic algorithms",
}


def _casts_now() -> tuple[tuple[str, torch.dtype | None], ...]:
    return tuple((k, torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None) for k in _KINDS)


class ModesLeftError(MisfitError):
    """User code ends under other modes than it began under."""


@contextmanager
def modes_kept() -> Iterator[Modes]:
    """Return a context that restores the modes at its end, whatever has run inside."""
    around, depth = Modes.now(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield around
    finally:
        if Modes.now() != around:
            around.put_back()
        while torch.autocast_increment_nesting() > depth:
            torch.autocast_decrement_nesting()
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        torch.autocast_decrement_nesting()


def recordable(tree: Any) -> Any:
    """Return a tree with inference tensors cloned, so that autograd can record them."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf, tree)
