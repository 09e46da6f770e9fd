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
from pathlib import Path

from quintsched.errors import InputError, MisfitError, nearest

from ..stored_tensors import StoredTensor

MOST_NAMED = 5
"""How many names an error lists."""

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

    def stored(self, tensors: Mapping[str, StoredTensor], prefix: Prefix) -> dict[str, StoredTensor]:
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


def require_names(
    where: Path,
    found: Collection[str],
    used: Collection[str],
    lacking: Mapping[str, str],
    fresh: Iterable[str],
    *,
    strict: bool,
) -> tuple[str, ...]:
    """Return the tensors of a checkpoint that no weight takes; with `strict` there may be none.

    Args:
        where: the checkpoint.
        found: names of its tensors.
        used: those that weights take.
        lacking: what it lacks, by its name there: our name.
        fresh: patterns on names of either kind that it may lack.
        strict: whether it has to have no others.

    Raises `InputError` for what it lacks, `MisfitError` for what it has beyond the model.
    """
    unused = tuple(name for name in found if name not in used)
    missing = {
        name: ours for name, ours in lacking.items() if not any(fnmatchcase(n, p) for n in (name, ours) for p in fresh)
    }
    if missing:
        first, *others = missing
        more = f", nor {_listed(others)}" if others else ""
        raise InputError(
            f"{where}: the checkpoint has no tensor {first!r} (for {missing[first]}){more}"
            f"{nearest(first, unused or found)}; where these weights are to keep their initial values, say so with "
            f"fresh={[*missing][:MOST_NAMED]!r} (in a job, model.fresh)"
        )
    if unused and strict:
        raise MisfitError(
            f"{where}: the model has no weight for {_listed(unused)} of the checkpoint{nearest(unused[0], used)}; "
            "leave that out with strict=False (in a job, model.strict: false)"
        )
    return unused


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more
