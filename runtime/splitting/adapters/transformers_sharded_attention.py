"""Attention of transformers' models over slices of sequences: registered in that library's attention interface.

    config._attn_implementation   "sdpa" ──▶ "quintsched_sdpa", once a block is passed a unit's `context` or `past`
    mask    plain causal, or none: not built; any other: from the positions of the unit
    attend  `context.attend(…)`, or over the keys and values of the slices before (`past.extend`)

Without a unit both behave as before. A model whose attention does not use that interface attends within its slice only,
which the proof of the engine detects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.errors import MisfitError

from ...autograd.slice_kv_cache import Past
from ...parallel.context.context_parallel import Context
from ...user_objects.host_value_equality import INSTEAD

_IMPLEMENTATION = "_attn_implementation_internal"

_SIGHT: ContextVar[Sight | None] = ContextVar("sight", default=None)


class Sight:
    """Reach of a block's attentions beyond its slice: a context (cp), or the past slices."""

    def __init__(self, context: Context | None, past: Past | None) -> None:
        self.context, self.past = context, past
        self.all_seen: Tensor | None = None
        """Mask of ones: it keeps models from inferring packed sequences from positions."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the slice's tokens in their sequence."""
        if self.context is not None:
            return self.context.positions
        assert self.past is not None
        return torch.arange(self.past.seen, self.past.seen + length, device=device)


@contextmanager
def seeing(sight: Sight | None) -> Iterator[None]:
    """Set the reach of attentions within a context."""
    token = _SIGHT.set(sight)
    try:
        yield
    finally:
        _SIGHT.reset(token)


def look_here(modules: Iterable[nn.Module]) -> None:
    """Switch these modules' attention to the implementation registered here."""
    for module in modules:
        config = getattr(module, "config", None)
        own = getattr(config, _IMPLEMENTATION, None)
        if isinstance(own, str) and not own.startswith(INSTEAD):
            _register(own)
            setattr(config, _IMPLEMENTATION, INSTEAD + own)


def _register(own: str) -> None:
    library = import_module("transformers")
    library.AttentionInterface.register(INSTEAD + own, partial(_attend, own))
    library.AttentionMaskInterface.register(INSTEAD + own, partial(_mask, own))


def _mask(own: str, **given: Any) -> Tensor | None:
    """Return the mask of keys for the queries of a slice; None: causal by default, or full where nothing is causal."""
    sight = _SIGHT.get()
    if sight is None:
        mask: Tensor | None = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS[own](**given)
        return mask
    padding, window = given.get("attention_mask"), given.get("local_size")
    if padding is not None and padding is not sight.all_seen and not bool(padding.all()):
        raise MisfitError(
            "attention_mask hides tokens, but attention over slices of sequences (cp, slices) has no padding; leave "
            "it out where all padding is behind the tokens: labels of -100 keep it out of the loss"
        )
    if sight.context is not None:
        if window is not None and window < sight.context.length:
            return torch.full((1, 1, 1, 1), window)  # carries the window's size; refused where a layer uses it
        return None
    queries = sight.positions(given["q_length"], given["device"])
    keys = torch.arange(int(queries[-1]) + 1, device=given["device"])
    rows = torch.arange(given["batch_size"], device=given["device"])
    seen: Tensor = given["mask_function"](
        rows[:, None, None, None],
        rows.new_zeros(1, 1, 1, 1),
        queries[:, None].expand(1, 1, -1, 1),
        keys.expand(1, 1, 1, -1),
    )
    return seen.expand(given["batch_size"], -1, len(queries), len(keys))


def _attend(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' functions do: (samples, heads, tokens, size) to (samples, tokens, heads, size)."""
    sight = _SIGHT.get()
    if sight is None:
        return _own_function(own, module)(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    _require_plain(module, dropout, others)
    size, width = query.shape[-1], value.shape[-1]
    if scaling is not None:
        query = query * (scaling * size**0.5)
    is_causal = others.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sight.context is not None:
        _require_no_window(attention_mask, sight.context.length)
        padded = F.pad(value, (0, size - width)) if width < size else value
        mixed = sight.context.attend(query, key, padded, is_causal)[..., :width]
    else:
        assert sight.past is not None
        if not is_causal:
            raise MisfitError(f"{type(module).__name__} is not causal, so that its slices cannot come one by one")
        key, value = sight.past.extend(module, key, value)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, enable_gqa=grouped)
    return mixed.transpose(1, 2).contiguous(), None


def _require_no_window(mask: Tensor | None, length: int) -> None:
    if mask is not None and mask.dtype is torch.int64:
        raise MisfitError(
            f"a layer attends to a window of {int(mask)} tokens, which cp does not do for sequences of {length}; "
            f"train on sequences of at most {int(mask)} tokens, or without cp"
        )


def _require_plain(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    what = next(
        (name for name in ("softcap", "s_aux", "position_bias", "head_mask") if others.get(name) is not None), ""
    )
    if dropout:
        what = f"dropout of {dropout}"
    if what:
        raise MisfitError(
            f"{type(module).__name__} attends with {what}, which attention over slices of sequences (cp, slices) does "
            "not have; " + ("set the model's attention dropout to 0" if dropout else "run without them")
        )


def _own_function(own: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that a module would have called without this one."""
    homes = [sys.modules.get(kind.__module__) for kind in type(module).__mro__]
    eager = next((found for home in homes if (found := getattr(home, "eager_attention_forward", None))), None)
    registered = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    function: Callable[..., Any] = registered.get_interface(own, eager)
    return function
