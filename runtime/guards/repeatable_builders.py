"""Check that functions that build blocks return the same block at each call: ranks call them in another order.

the first call, without data         L(idx=1)  ┐ refused, unless only random draws differ: two calls
the one that this rank trains        L(idx=9)  ┘ under one seed return the same then
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..blocks.block_builders import BlockOrBuilder, on_meta
from ..user_objects.library_or_user import PLAIN_TYPES, is_of_library, is_ours
from ..user_objects.object_contents import OF_TORCH, attributes_of

_DEEPEST = 4


def why_unlike(number: int, block: BlockOrBuilder, first: nn.Module, built: nn.Module) -> str:
    """Return the reason to refuse a function that built one block first, without data, then another; "": none."""
    if isinstance(block, nn.Module) or is_ours(block) or not _difference(first, built):
        return ""
    if not (other := _difference(on_meta(block), on_meta(block))):
        return ""
    return (
        f"block {number} ({type(built).__name__}): the function that builds it gives another block at each call: "
        f"{other}; ranks call it several times, and not for all blocks, so let it go by its arguments alone: "
        "[partial(make, layer) for layer in range(layers)]"
    )


def _difference(one: nn.Module, other: nn.Module) -> str:
    """Return a difference between two blocks, in words; "": none. An object that both hold is no difference."""
    was, now = _own(one), _own(other)
    for key in {**was, **now}:
        first, second = was.get(key), now.get(key)
        if first is not second and _words(first) != _words(second):
            return f"{key} is {_words(first)}, then {_words(second)}"
    return ""


def _own(block: nn.Module) -> dict[str, Any]:
    """Return the attributes of a block's modules, and shapes of its tensors, by name."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        label = f"{path} ({type(module).__name__})".lstrip()
        found |= {f"{label}.{key}": held[key] for key in held if key not in OF_TORCH}
    return found


def _words(value: Any, depth: int = 0) -> str:
    """Return a value in words: plain values, shapes, and the contents of containers and user objects."""
    if isinstance(value, Tensor):
        return "unknown" if is_lazy(value) else str(tuple(value.shape))
    is_open = isinstance(value, SimpleNamespace) or not is_of_library(type(value))
    if is_open and not isinstance(value, nn.Module | type):
        value = attributes_of(value)
    if isinstance(value, dict) and depth < _DEEPEST:
        return str({key: _words(held, depth + 1) for key, held in value.items() if isinstance(key, PLAIN_TYPES)})
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        return str([_words(held, depth + 1) for held in value])
    return repr(value) if isinstance(value, PLAIN_TYPES) else type(value).__name__
