"""Location of an error within a block: the innermost submodule whose `forward` was running."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn


def place_of(error: BaseException, number: int, block: nn.Module) -> str:
    """Return, for an error message, the submodule of block `number` that raised an error."""
    name = f"block {number} ({type(block).__name__})"
    inner = _innermost(error, block)
    if inner is None or not inner[0]:
        return name
    path, module = inner
    return f"{name}, in its {path!r}, a {type(module).__name__}"


def block_of(error: BaseException, blocks: dict[int, nn.Module]) -> int | None:
    """Return the number of the block that was running when an error was raised; None if none was running."""
    return next((number for number, block in blocks.items() if _innermost(error, block) is not None), None)


def _innermost(error: BaseException, block: nn.Module) -> tuple[str, nn.Module] | None:
    paths = {id(module): path for path, module in block.named_modules()}
    found = None
    for frame in frames(error):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths:
            found = paths[id(module)], module
    return found


def frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the stack frames of an error's traceback, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
