"""Frameworks: the strategies that each can run, and the arguments with which it runs one.

    tune --for megatron                  only 1F1B and interleaved 1F1B, ZeRO-0 and 1, …
    tune --for megatron --emit DIR       DIR/megatron.args: --tensor-model-parallel-size 8 …

The writers of arguments are in `megatron_arguments` and `torch_arguments`. Names of arguments are those of the
framework's own parser, at the commit that `FRAMEWORKS` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintsched.errors import UsageError, suggest
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy, modules_of
from quintsched.strategies.tuning.axis_choices import OF_MEGATRON, OF_TORCH, Choices
from quintsched.strategies.tuning.export.megatron_arguments import MEGATRON_MODULES, megatron_arguments, megatron_notes
from quintsched.strategies.tuning.export.torch_arguments import (
    deepspeed_arguments,
    deepspeed_notes,
    torchtitan_arguments,
    torchtitan_notes,
)

OWN = "quintsched"


@dataclass(frozen=True)
class Framework:
    """A framework: what it can run, and, unless it is our own runtime, its parser and how its arguments are written.

    Attributes:
        runs: values that it can run, by axis of a search; axes that are left out are free.
        usual: choices that are taken unless others are asked for.
        modules: modules of a layer that it recomputes.
        numbers: whether it recomputes a number of layers of each stage.
        stages: whether it can be told the layers of each stage.
        parser: repository, file and commit of its parser.
        file: name of the file of arguments.
        start: the command that is given them.
        text: returns that file's text for a model and a resolved strategy.
        notes: yields what the user has to do besides.
    """

    runs: Mapping[str, tuple[Any, ...]]
    usual: Mapping[str, Any]
    modules: tuple[str, ...] = ()
    numbers: bool = False
    stages: bool = False
    parser: tuple[str, str, str] = ("", "", "")
    file: str = ""
    start: str = ""
    text: Callable[[Model, Strategy], str] | None = None
    notes: Callable[[Model, Strategy], Iterator[str]] | None = None

    def recomputes(self, value: object) -> bool:
        """Whether it can recompute what a choice says."""
        if value in ("none", "full"):
            return True
        named = modules_of(value)
        return {*named} <= {*self.modules} if named else self.numbers and isinstance(value, int)


FRAMEWORKS: dict[str, Framework] = {
    "megatron": Framework(
        runs={
            "schedule": OF_MEGATRON,
            "zero": (0, 1),
            "dtype": ("fp8", "mxfp8", "bf16", "fp16", "fp32"),
            "pp_duplex": (True,),
        },
        usual={"fused_accumulation": True, "recompute": ("none", "selective", "full")},
        modules=MEGATRON_MODULES,
        numbers=True,
        stages=True,
        parser=("NVIDIA/Megatron-LM", "megatron/training/arguments.py", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"),
        file="megatron.args",
        start="torchrun … pretrain_gpt.py $(cat {file})",
        text=megatron_arguments,
        notes=megatron_notes,
    ),
    "torchtitan": Framework(
        runs={
            "schedule": OF_TORCH,
            "zero": (2, 3),
            "dtype": ("bf16", "fp32"),
            "sequence_parallel": (True,),
            "fused_accumulation": (False,),
        },
        usual={"recompute": ("none", "full")},
        parser=("pytorch/torchtitan", "torchtitan/config/configs.py", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"),
        file="torchtitan.args",
        start="torchrun … -m torchtitan.train --module … --config … $(cat {file})",
        text=torchtitan_arguments,
        notes=torchtitan_notes,
    ),
    "deepspeed": Framework(
        runs={
            "schedule": ("1f1b",),
            "chunks": (1,),
            "cp": (1,),
            "dtype": ("bf16", "fp16", "fp32"),
            "sequence_parallel": (False,),
            "fused_accumulation": (False,),
            "pp_duplex": (False,),
        },
        usual={"pp": (1,), "tp": (1,), "recompute": ("none", "full")},
        parser=("deepspeedai/DeepSpeed", "deepspeed/runtime/config.py", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641"),
        file="deepspeed.json",
        start="deepspeed train.py --deepspeed_config {file}",
        text=deepspeed_arguments,
        notes=deepspeed_notes,
    ),
    OWN: Framework(
        runs={"dtype": ("bf16", "fp32", "fp64"), "fused_loss": (False,), "fused_accumulation": (False,)},
        usual={"recompute": ("none", "full")},
        numbers=True,
        stages=True,
    ),
}
"""Frameworks by name."""

DEEPSPEED_ZERO = {"pp": 1, "tp": 2}
"""Highest stage of ZeRO beside a pipeline, and beside AutoTP."""


def find_framework(name: str) -> Framework:
    """Return a framework; raises `UsageError` for an unknown name."""
    if name not in FRAMEWORKS:
        raise UsageError(f"--for: no framework is called {name!r}{suggest(name, FRAMEWORKS)}")
    return FRAMEWORKS[name]


def restrict(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of a search, as far as a framework can run them.

    Raises `UsageError` for an unknown framework, and for an axis of which it can run no choice.
    """
    framework = find_framework(name)
    found, runs = {**framework.usual, **given}, dict(framework.runs)
    if name == "deepspeed":
        beside = [most for axis, most in DEEPSPEED_ZERO.items() if any(size > 1 for size in _listed(found[axis]))]
        runs["zero"] = tuple(range(min([3, *beside]) + 1))
    for axis, able in runs.items():
        usual = able if axis == "schedule" else Choices.model_fields[axis].default or able
        wanted = usual if found.get(axis) is None else _listed(found[axis])
        wanted = wanted if axis in given or {*wanted} & {*able} else able
        found[axis] = _kept(name, axis, wanted, [value for value in wanted if value in able], able)
    asked = _listed(found["recompute"])
    found["recompute"] = _kept(
        name, "recompute", asked, list(filter(framework.recomputes, asked)), ("none", "full", *framework.modules)
    )
    return found


def settled(name: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of one strategy, in which a framework's own value stands for each that is left out.

    Raises `UsageError` as `restrict` does, and for layers of stages that the framework cannot be told.
    """
    if flags.get("stages") and not find_framework(name).stages:
        raise UsageError(f"--for {name}: it has no argument for the layers of each stage; leave out --stages")
    if flags.get("offload") is not None and name != OWN:
        raise UsageError(f"--for {name}: --offload is a cap of this project's runtime; leave it out")
    asked = {axis: value for axis, value in flags.items() if axis in Choices.model_fields}
    able = {axis: _listed(values) for axis, values in restrict(name, asked).items()}
    fields = {axis: Strategy.model_fields[axis].default for axis in {*able} & {*Strategy.model_fields} - {*asked}}
    mine = {axis: able[axis][0] for axis, usual in fields.items() if usual not in (None, *able[axis])}
    return {**mine, **flags}


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _kept(name: str, axis: str, asked: tuple[Any, ...], kept: list[Any], able: tuple[Any, ...]) -> list[Any]:
    if not kept:
        raise UsageError(
            f"--for {name}: it does not run {axis} {', '.join(map(str, asked))}; it runs {', '.join(map(str, able))}"
        )
    return kept
