"""What the model's tensors are called elsewhere.

    ours, in blocks              the model's own (split)                        in a checkpoint of the base model alone
    3.self_attn.q_proj.weight    model.layers.2.self_attn.q_proj.weight         layers.2.self_attn.q_proj.weight

A model that was split knows its own names; that of a built-in GPT are GPT-2's (`gpt2`); all others go by ours. Where
most names of a checkpoint are the model's but for a first part ("model.", "bert.", "transformer."), they are found
without it, or with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from .safetensors_folder import Lying

OLD_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias|attention\.rotary_emb\.inv_freq)$"
)
"""Buffers that are computed, and that older versions of transformers saved all the same."""


@dataclass(frozen=True)
class Origin:
    """Where a tensor is found in a checkpoint; "{layer}" is the number of the transformer block, from 0."""

    name: str
    transposed: bool = False
    is_cut_short: bool = False
    """Whether the first rows are taken where there are more."""
    alike: tuple[str, ...] = ()
    """Further names of the same tensor: those that there are have to be alike."""
    otherwise: str | None = None
    """The tensor that is read instead where there is none of these names."""

    def at(self, layer: int) -> Origin:
        """Return where the tensor of one layer is found."""
        return replace(self, name=self.name.format(layer=layer))

    def lying(self, tensors: Mapping[str, Lying], prefix: Prefix) -> dict[str, Lying]:
        """Return what is found of it: under each of its names that there are, or the one that is read instead."""
        in_file = dict.fromkeys(prefix.in_file(name) for name in (self.name, *self.alike))
        found = {name: tensors[name] for name in in_file if name in tensors}
        if found or self.otherwise is None:
            return found
        instead = prefix.in_file(self.otherwise)
        return {instead: tensors[instead]} if instead in tensors else {}


@dataclass(frozen=True)
class Prefix:
    """A first part of names that a checkpoint lacks (`strips`), or has beyond the model's (`adds`)."""

    strips: str = ""
    adds: str = ""

    def in_file(self, name: str) -> str:
        """Return what a tensor of the model is called in the checkpoint."""
        return self.adds + name.removeprefix(self.strips)


def find_prefix(names: Iterable[str], found: Collection[str]) -> Prefix:
    """Return the prefix with which most names of the model are found; none wins where others find no more."""
    names = list(dict.fromkeys(names))
    first_parts = dict.fromkeys(name.partition(".")[0] + "." for name in names if "." in name)
    added = dict.fromkeys(name.partition(".")[0] + "." for name in found if "." in name)
    tried = [Prefix(), *(Prefix(strips=part) for part in first_parts), *(Prefix(adds=part) for part in added)]
    return max(tried, key=lambda prefix: sum(prefix.in_file(name) in found for name in names))


def join_tied(origins: Mapping[str, Origin], groups: Iterable[Sequence[str]]) -> dict[str, Origin]:
    """Let tensors that are one be found under each other's names; `groups` are names of ours."""
    joined = dict(origins)
    for group in groups:
        held = [name for name in group if name in origins]
        for name in held:
            mine = joined[name]
            others = dict.fromkeys([*mine.alike, *(origins[partner].name for partner in held)])
            joined[name] = replace(mine, alike=tuple(other for other in others if other != mine.name))
    return joined


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is for a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
