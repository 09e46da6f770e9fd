"""Choices of a search, axis by axis; an axis that is left out is free.

    Choices(tp=8, recompute="full")             tp fixed, recomputation fixed, all else free
    Choices(tp=(4, 8), zero=(0, 1))             two values each
    Choices(recompute=("none", "per-stage"))    nothing, or any number of layers of each stage

`quintsched tune --tp 8 --recompute full` gives the first of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from quintsched.errors import UsageError, quoted, suggest
from quintsched.strategies.descriptions.model import Count, Description, Model, Size
from quintsched.strategies.descriptions.strategy import DType, Modules

RecomputeChoice = Literal["none", "selective", "full", "per-stage"] | Modules | Count
"""Recomputed layers of each stage: none, attention's scores only, all, modules of each, a number; or a different number
per stage."""
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "gpipe")
"""Schedules that are searched by default."""
MIXTURES = (*SCHEDULES, "dualpipe-v", "dualpipe")
"""Schedules that are searched for models with experts, whose exchange of tokens the last two hide."""
RECOMPUTED = ("none", "selective", "full", "per-stage")
"""Recomputation that is searched by default; with experts, whose activations are the most, also `light_modules`."""
OF_MEGATRON = ("1f1b", "interleaved-1f1b")
OF_TORCH = (*OF_MEGATRON, "gpipe", "interleaved-zb", "zbv", "dualpipe-v")
ALIKE = (SCHEDULES, MIXTURES, OF_MEGATRON, OF_TORCH)
"""Schedules that are searched where the user names none, by model and framework."""
UNLIMITED = 2**40


class Choices(Description):
    """Values that each axis may take; None: all that divide. See the module; `from_values` raises `UsageError`."""

    dp: tuple[Size, ...] | None = None
    tp: tuple[Size, ...] | None = None
    pp: tuple[Size, ...] | None = None
    cp: tuple[Size, ...] | None = None
    ep: tuple[Size, ...] | None = None
    schedule: tuple[str, ...] = SCHEDULES
    chunks: tuple[Size, ...] | None = None
    microbatch: tuple[Size, ...] | None = None
    dtype: tuple[DType, ...] = ("bf16",)
    zero: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    zero_every: tuple[Size, ...] = (1,)
    """With ZeRO-2 and 3, number of microbatches after which gradients are reduced."""
    overlap: tuple[bool, ...] = (True,)
    """Whether communication of replicas runs beside backwards and forwards; searched on request only."""
    pp_duplex: tuple[bool, ...] = Field(default=(True,), max_length=1)
    ep_overlap: tuple[bool, ...] = Field(default=(True,), max_length=1)
    tp_overlap: tuple[bool, ...] = Field(default=(True,), max_length=1)
    fused_accumulation: tuple[bool, ...] = Field(default=(False,), max_length=1)
    fused_loss: tuple[bool, ...] = Field(default=(False,), max_length=1)
    gradients: tuple[DType | None, ...] = Field(default=(None,), max_length=1)
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute: tuple[RecomputeChoice, ...] = RECOMPUTED
    even: bool = Field(default=False)
    """Whether every stage must have the same number of layers."""

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: _listed(name, value) for name, value in given.items() if value is not None}

    def of_model(self, model: Model) -> Choices:
        """Return the choices with the default schedules and recomputation of a model with experts."""
        if model.experts is None:
            return self
        usual = {"schedule": (SCHEDULES, MIXTURES), "recompute": (RECOMPUTED, (*RECOMPUTED, light_modules(model)))}
        return self.model_copy(update={n: own for n, (plain, own) in usual.items() if getattr(self, n) == plain})

    @classmethod
    def from_values(cls, given: Mapping[str, Any] | None) -> Choices:
        """Return the choices for `given`, axis → value or values; raises `UsageError` for unknown axes and values."""
        unknown = sorted(set(given or {}) - set(cls.model_fields))
        if unknown:
            raise UsageError(f"tune: no axis is called {quoted(unknown[0])}{suggest(unknown[0], cls.model_fields)}")
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"tune: {first['loc'][0]} = {quoted(first['input'])}: {first['msg'].lower()}") from None


def _listed(name: str, value: Any) -> Any:
    if name == "even":
        return value
    values = tuple(value) if isinstance(value, (list, tuple, set, range)) else (value,)
    if not values:
        raise UsageError(f"tune: {name} has no choice; name one value at least, or leave it out")
    return tuple(dict.fromkeys(values)) if all(isinstance(one, Hashable) for one in values) else values


def light_modules(model: Model) -> str:
    """Return the modules that cost little when they run again, as in DeepSeek-V3 (arXiv:2412.19437, 3.2.3, 3.3.3)."""
    return "layernorm+mla_up_proj+moe_act" if model.latent is not None else "layernorm+moe_act"


def allows(choice: tuple[int, ...] | None, value: int) -> bool:
    """Return whether an axis may take `value`."""
    return choice is None or value in choice
