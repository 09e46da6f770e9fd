"""Settings of an engine that its ranks compare: options, structure of the blocks, loss and metrics, optimizer.

    options     clip, dtype, seed, names of metrics, …
    blocks      for each: class; names, shapes and dtypes of its weights; attributes of torch's own modules; code
    loss        class or name, plain attributes, code                    on ranks with a last stage
    optimizer   class and options of each parameter group                on ranks that step weights

Values in user code (attributes of blocks, globals, closures) may differ between ranks, as a rank's own number does:
differences are only logged. Initial weights are not compared: the ranks that hold a weight are given the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.plan import Plan

from ..comm import Group
from ..user_objects.code_digest import Described, describe_function, describe_module
from .job_fingerprint_between_ranks import plan_section
from .refuse_unequal_ranks import Plain, Section, Sections, require_same, warn_of_differences

_PLAIN = (bool, int, float, str)


def agree_on_options(plan: Plan, options: Mapping[str, Any], world: Group) -> None:
    """Raise `MisfitError` where ranks have other plans or options (collective).

    Costs of blocks are left out: they may be measured on each rank, and the resulting stages are compared later.
    """
    said = {f"engine.{name}": _plain(value) for name, value in options.items() if name != "block_costs"}
    sections = {"plan": plan_section(plan), "options": Section.from_settings(said)}
    require_same(sections, world, "the plan and the engine's options", "give all ranks the same")


def agree_on_blocks(outlines: Sequence[nn.Module], cuts: Sequence[range], world: Group) -> None:
    """Raise `MisfitError` where ranks have blocks of another structure, values apart, or other stages (collective)."""
    same = {"blocks": _blocks_section(outlines, cuts)}
    require_same(same, world, "the blocks", "build the same blocks on all ranks, and cut them alike")
    read = [
        (f"block {n}, {path or 'itself'}", m) for n, block in enumerate(outlines) for path, m in block.named_modules()
    ]
    _compare_values({"values": _values({name: describe_module(module) for name, module in read})}, world)


def agree_on_functions(
    functions: Mapping[str, Callable[..., Any]] | None, optimizer: Section | None, world: Group
) -> None:
    """Raise `MisfitError` where the ranks that use them have another loss, metric or optimizer (collective)."""
    found = None if functions is None else {name: describe_function(given) for name, given in functions.items()}
    same = None if found is None else Section.from_settings({name: described.what for name, described in found.items()})
    sections = {"functions": same, "optimizer": optimizer}
    require_same(sections, world, "the loss and the optimizer", "give all ranks the same")
    _compare_values({"values": None if found is None else _values(found)}, world)


def _compare_values(sections: Sections, world: Group) -> None:
    advice = "what is computed with them is not what one process computes, unless it does not depend on them"
    warn_of_differences(sections, world, "values in their blocks, losses and metrics", advice)


def _values(found: Mapping[str, Described]) -> Section:
    """Return the plain values that described objects read, keyed by the object's name and the value's."""
    return Section.from_settings(
        {f"{name}, {key}": value for name, one in found.items() for key, value in one.read.items()}
    )


def _blocks_section(outlines: Sequence[nn.Module], cuts: Sequence[range]) -> Section:
    """Return the structure of the blocks, without the values of weights, and the blocks of each stage."""
    words = {f"block {number}": list(_outline(block)) for number, block in enumerate(outlines)}
    words |= {f"stage {number}": [f"blocks {blocks.start} to {blocks.stop - 1}"] for number, blocks in enumerate(cuts)}
    text = "\n".join(line for name, lines in words.items() for line in (name, *lines))
    return Section(text, lambda: {k: v for name, lines in words.items() for k, v in _lines(name, lines)})


def _lines(name: str, lines: Sequence[str]) -> Iterator[tuple[str, Plain]]:
    """Yield a block's class, then its weights and attributes, each under its own name."""
    yield name, lines[0]
    for line in lines[1:]:
        key, _, value = line.partition("\t")
        yield f"{name}, {key}", value


def _outline(block: nn.Module) -> Iterator[str]:
    yield type(block).__qualname__
    for name, tensor in (*block.named_parameters(remove_duplicate=False), *block.named_buffers()):
        frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
        yield f"{name}\t{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}"
    for path, module in block.named_modules():
        yield f"{path or 'itself'}\t{describe_module(module).what}"


def optimizer_section(optimizers: Sequence[Optimizer]) -> Section:
    """Return the classes of the optimizers, and the options of their parameter groups."""
    found: dict[str, Plain] = {}
    for number, optimizer in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        found[name] = type(optimizer).__qualname__
        for place, group in enumerate(optimizer.param_groups):
            of_group = name if len(optimizer.param_groups) == 1 else f"{name}, group {place}"
            for key, value in group.items():
                if key != "params":
                    found[f"{of_group}.{key}"] = _plain(value)
    return Section.from_settings(found)


def _plain(value: Any) -> Plain:
    """Return a setting as a plain value to compare: of arbitrary objects, only the class name."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() == 1 else f"a tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset | range):
        items = [str(_plain(item)) for item in value]
        return ", ".join(items if isinstance(value, list | tuple | range) else sorted(items))
    if isinstance(value, torch.dtype | Enum) or is_dataclass(value):
        return repr(value)
    return type(value).__qualname__
