"""What an engine knows of its run: options, what its blocks are like, what computes the loss, what steps the weights.

    options     clip, dtype, seed, names of metrics, …
    blocks      of each: class, names, shapes and types of its weights, plain attributes, code, and what that reads
    loss        class or name, plain attributes, code, and what that reads    where a rank has a last stage
    optimizer   class and options of each group of parameters            where a rank steps weights

Numbers are not compared: initial weights are made the same for all who hold them.
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
from .comparison import Plain, Section, require_same
from .records import plan_section
from .user_code import describe_function, describe_module, in_one

_PLAIN = (bool, int, float, str)


def agree_on_options(plan: Plan, options: Mapping[str, Any], world: Group) -> None:
    """Raise `MisfitError` where ranks have other plans or options (collective).

    What blocks cost is left out: it may be measured on each rank, and which blocks are a stage is compared later.
    """
    said = {f"engine.{name}": _plain(value) for name, value in options.items() if name != "block_costs"}
    sections = {"plan": plan_section(plan), "options": Section.of(said)}
    require_same(sections, world, "the plan and the engine's options", "give all ranks the same")


def agree_on_blocks(outlines: Sequence[nn.Module], cuts: Sequence[range], world: Group) -> None:
    """Raise `MisfitError` where ranks have other blocks, whatever numbers are in them, or other stages (collective)."""
    same = {"blocks": _blocks_section(outlines, cuts)}
    require_same(same, world, "the blocks", "build the same blocks on all ranks, and cut them alike")


def agree_on_functions(
    functions: Mapping[str, Callable[..., Any]] | None, optimizer: Section | None, world: Group
) -> None:
    """Raise `MisfitError` where ranks that use them have another loss, metrics or optimizer (collective)."""
    sections = {"functions": None if functions is None else _functions_section(functions), "optimizer": optimizer}
    require_same(sections, world, "the loss and the optimizer", "give all ranks the same")


def _blocks_section(outlines: Sequence[nn.Module], cuts: Sequence[range]) -> Section:
    """Return what blocks are like, whatever numbers are in them, and which are a stage."""
    words = {f"block {number}": list(_outline(block)) for number, block in enumerate(outlines)}
    words |= {f"stage {number}": [f"blocks {blocks.start} to {blocks.stop - 1}"] for number, blocks in enumerate(cuts)}
    text = "\n".join(line for name, lines in words.items() for line in (name, *lines))
    return Section(text, lambda: {k: v for name, lines in words.items() for k, v in _lines(name, lines)})


def _lines(name: str, lines: Sequence[str]) -> Iterator[tuple[str, Plain]]:
    """Yield a block's class, then its weights and attributes, each under a name of its own."""
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
        for key, words in in_one(path or "itself", describe_module(module)).items():
            yield f"{key}\t{words}"


def _functions_section(functions: Mapping[str, Callable[..., Any]]) -> Section:
    """Return what functions of the user's are: names, plain attributes and options, their code, and what it reads."""
    found: dict[str, Plain] = {}
    for name, function in functions.items():
        found |= in_one(name, describe_function(function))
    return Section.of(found)


def optimizer_section(optimizers: Sequence[Optimizer]) -> Section:
    """Return the classes of optimizers, and the options of their groups."""
    found: dict[str, Plain] = {}
    for number, optimizer in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        found[name] = type(optimizer).__qualname__
        for place, group in enumerate(optimizer.param_groups):
            of_group = name if len(optimizer.param_groups) == 1 else f"{name}, group {place}"
            for key, value in group.items():
                if key != "params":
                    found[f"{of_group}.{key}"] = _plain(value)
    return Section.of(found)


def _plain(value: Any) -> Plain:
    """Return a setting as it is compared; of an object that may hold anything, its class."""
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
