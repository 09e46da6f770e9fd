"""Flags of a strategy, shared by `predict` and `tune`: one value each, or for `tune` several to choose among.

predict --tp 8 --recompute 1,2      {"tp": 8, "recompute": "1,2"}       one number per stage
tune --tp 4,8 --schedule 1f1b,zbv   {"tp": [4, 8], "schedule": ["1f1b", "zbv"]}
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from quintsched.cli.request_options import AXIS_OPTIONS, mesh_given
from quintsched.errors import UsageError, counted, suggest

MESH = "mesh"


@dataclass(frozen=True)
class Flag:
    """One flag: its placeholder and text in the help, and whether its value is a number."""

    metavar: str
    doc: str
    is_number: bool = True
    has_choice: bool = True
    """Whether `tune` takes several values."""


FLAGS: dict[str, Flag] = {
    "model": Flag("MODEL", "A preset, a file, or transformers' config.json.", is_number=False, has_choice=False),
    "hardware": Flag(
        "HARDWARE", "A preset, a file, or cpu: this machine, measured.", is_number=False, has_choice=False
    ),
    "gpus": Flag("N", "GPUs in all.", has_choice=False),
    "gpus_per_node": Flag("N", "GPUs of a node; default: the hardware's.", has_choice=False),
    **{axis: Flag("N", words) for axis, words in AXIS_OPTIONS.items()},
    "microbatch": Flag(
        "B", "Samples of a microbatch; the microbatches of a replica are batch / (dp x ep x microbatch)."
    ),
    "batch": Flag("B", "Samples of a step, over all replicas: a job's train.batch_size.", has_choice=False),
    "seq": Flag("S", "Tokens of a sample; default: the model's longest sequence.", has_choice=False),
    "chunks": Flag("V", "Stages per pipeline rank."),
    "schedule": Flag("NAME", "The pipeline's schedule.", is_number=False),
    "recompute": Flag(
        "WHAT",
        "none, selective, full, modules (layernorm+moe_act), or a number of layers of each stage.",
        is_number=False,
    ),
    "zero": Flag("0-3", "What is sharded over replicas: optimizer state, gradients, weights."),
    "zero_every": Flag("K", "With ZeRO-2 and 3, microbatches after which gradients are reduced (1)."),
    "dtype": Flag("TYPE", "fp8, mxfp8, bf16, fp16, fp32 or fp64.", is_number=False),
    "gradients": Flag(
        "TYPE", "Precision in which gradients are added up; default: fp32 (fp16 reduces its own).", is_number=False
    ),
    "offload": Flag(
        "X",
        "Most microbatches of activations that a rank keeps; others are in host memory meanwhile.",
        is_number=False,
        has_choice=False,
    ),
    "stages": Flag("LAYERS", "Layers of each stage, 3,4,4,3; default: as even as can be.", is_number=False),
}
"""Flags with a value."""

SWITCH_FLAGS: dict[str, str] = {
    "sequence_parallel": "Whether tp's ranks share out the tokens between products.",
    "overlap": "Whether reductions, gathers and messages of interleaved 1F1B run beside computation (default: yes).",
    "pp_duplex": "Whether a message in and one out between stages are exchanged at once (default: yes).",
    "ep_overlap": "Whether tokens are exchanged beside another microbatch's computation under interleaved 1F1B.",
    "tp_overlap": "Whether reductions over tp run beside the products for weights' gradients (default: yes).",
    "fused_loss": "Whether the cross-entropy is one kernel, in place of the logits.",
    "fused_accumulation": "Whether products add weights' gradients to earlier ones themselves, as in Megatron-LM.",
}
"""Flags that are on or off."""

CHOSEN = tuple(name for name in FLAGS if name not in ("offload", "stages"))
"""Flags of `tune`."""


def taking_flags(*names: str, several: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all flags, or those named; it gets the given values as `flags`."""
    chosen = {name: FLAGS[name] for name in (names or FLAGS)}
    switches = list(SWITCH_FLAGS)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            texts = {name: options.pop(name) for name in (*chosen, *switches)}
            given = {name: read_flag(name, text, several) for name, text in texts.items() if text is not None}
            command(flags=given | axes_of_mesh(options.pop(MESH), texts, several), **options)

        others = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "flags"]
        first = [one for one in others if one.default is inspect.Parameter.empty or _is_argument(one)]
        rest = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in others if one not in first]
        first = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in first]
        both = [
            *first,
            *(_option(name, flag, several) for name, flag in chosen.items()),
            _mesh_option(),
            *map(_switch, switches),
            *rest,
        ]
        run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def axes_of_mesh(mesh: str | None, texts: Mapping[str, Any], several: bool = False) -> dict[str, Any]:
    """Return the flags that --mesh stands for: all axes, and how many GPUs these are; raises UsageError.

    `texts` are the other options; one that says an axis too is refused, as is another number of GPUs.
    """
    from quintsched.ir.mesh import Mesh

    text = mesh_given(mesh, {axis: texts.get(axis) for axis in AXIS_OPTIONS})
    if mesh is None or text is None:
        return {}
    found = Mesh.parse(text)
    gpus = texts.get("gpus")
    if gpus is not None and read_flag("gpus", gpus) != found.size:
        raise UsageError(f"--gpus {gpus}, but --mesh {text} has {counted(found.size, 'rank')}; leave out one of them")
    sizes = {axis: found.axis_size(axis) for axis in AXIS_OPTIONS}
    return {"gpus": found.size, **{axis: [size] if several else size for axis, size in sizes.items()}}


def _mesh_option() -> inspect.Parameter:
    words = "The mesh in place of its axes and --gpus: dp=2,pp=4. Ranks are laid out pp, dp, ep, cp, tp in any case."
    kind = Annotated[str | None, typer.Option(option_of(MESH), metavar="AXES", help=words)]
    return inspect.Parameter(MESH, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(one, typer.models.ArgumentInfo) for one in getattr(parameter.annotation, "__metadata__", ()))


def _option(name: str, flag: Flag, several: bool) -> inspect.Parameter:
    choice = several and flag.has_choice
    words = f"{flag.doc.removesuffix('.')}; several to choose among: A,B." if choice else flag.doc
    kind = Annotated[str | None, typer.Option(option_of(name), metavar=flag.metavar, help=words)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _switch(name: str) -> inspect.Parameter:
    option = typer.Option(f"{option_of(name)}/{option_of(f'no_{name}')}", help=SWITCH_FLAGS[name])
    kind = Annotated[bool | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def option_of(name: str) -> str:
    """Return the option of a key: "--gpus-per-node"."""
    return f"--{name.replace('_', '-')}"


def read_flag(name: str, text: Any, several: bool = False) -> Any:
    """Return the value of a flag, or a list if several may be given; raises UsageError."""
    if name in SWITCH_FLAGS:
        return text if isinstance(text, bool) else _truth(name, text)
    flag = FLAGS[name]
    if several and flag.has_choice:
        return [_number(name, part) if _looks_whole(part) or flag.is_number else part for part in _parts(name, text)]
    return _number(name, text) if flag.is_number else text


def read_settings(option: str, text: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the row of text such as "dp=8,tp=4,recompute=full"; numbers per stage, and modules, are joined by +:
    recompute=1+0+0, recompute=layernorm+moe_act.

    `others` are further keys, whose values are text.
    """
    found: dict[str, Any] = {}
    known = (*FLAGS, *SWITCH_FLAGS, *others)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name not in known:
            raise UsageError(f"{option}: unknown key {name!r}{suggest(name, known)}")
        if not equals or not value:
            raise UsageError(f"{option}: cannot read {part!r} in {text!r}; write it like dp=8,tp=4,recompute=full")
        numbers = value.replace("+", ",") if value[0].isdecimal() else value
        found[name] = value if name in others else read_flag(name, numbers)
    return found


def _truth(name: str, value: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in words:
        raise UsageError(f"{name} is {value!r}; give true or false")
    return words[value.lower()]


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option_of(name)}: cannot read {text!r}; write the values with commas between: 1,2,4")
    return parts


def _looks_whole(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d{1,18}", text.strip()) is not None


def _number(name: str, text: str) -> int:
    if not _looks_whole(text):
        raise UsageError(f"{option_of(name)}: cannot read {text!r}; give a whole number")
    return int(text)
