"""Which blocks are of one kind, so that one proof is enough for all of them.

    80 layers of a model ─▶ one kind          classes, functions, settings, shapes of weights and buffers, how it is cut

What only counts layers (`layer_idx`) and what has no say in how numbers depend on each other (rates, scales: floats) is
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ..dropout import KeyedDropout
from ..tensor.cuts import Cut

_COUNTERS = ("idx", "index", "layer", "layer_id", "layer_number", "number", "i", "block_id")


def kind_of(block: nn.Module, cuts: Sequence[Cut], path: str) -> str:
    """Return the same text for blocks that are built and cut alike; `path` is the block's name."""
    cut_as = [f"{cut.path.removeprefix(path)}:{cut.split.value}:{cut.parts}:{cut.is_paired}" for cut in cuts]
    return "\n".join([*_modules(block), *_tensors(block), *sorted(cut_as)])


def _modules(block: nn.Module) -> Iterator[str]:
    for name, module in block.named_modules():
        own = (
            KeyedDropout.__annotations__ if isinstance(module, KeyedDropout) else ()
        )  # which dropout of the model it is
        settings = [f"{key}={value}" for key, value in vars(module).items() if key not in own and _counts(key, value)]
        functions = [f"{key}={_name_of(value)}" for key, value in vars(module).items() if callable(value)]
        yield " ".join([name, _name_of(type(module)), *settings, *functions])


def _tensors(block: nn.Module) -> Iterator[str]:
    for name, tensor in (*block.named_parameters(remove_duplicate=False), *block.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"


def _counts(key: str, value: object) -> bool:
    is_plain = value is None or isinstance(value, bool | int | str)
    return is_plain and key.strip("_") not in _COUNTERS and not key.endswith(("_idx", "_index", "layer_id"))


def _name_of(thing: object) -> str:
    line = getattr(getattr(thing, "__code__", None), "co_firstlineno", "")
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}{line}"
