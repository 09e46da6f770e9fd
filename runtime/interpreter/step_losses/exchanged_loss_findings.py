"""Findings about the loss and the metrics that ranks exchange to agree on what these are over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from ...losses.loss_reductions import LossWeight, Over


class Told(NamedTuple):
    """Findings of all ranks, each field by rank; `of_any`: refusals that hold even for a single microbatch."""

    rule: Sequence[str]
    refusal: Sequence[str]
    of_metrics: Sequence[str]
    of_any: Sequence[str]
    since: Sequence[str]
    unlinear: Sequence[str]
    adds: Sequence[bool]
    is_of_each: Sequence[bool]
    has_odd_sizes: Sequence[bool]
    is_blind: Sequence[bool]
    of_each: Sequence[float | None]
    rests: Sequence[dict[str, list[str]]]
    is_watched: Sequence[bool]
    has_supposed: Sequence[bool]

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Told:
        """Parse the JSON texts of all ranks."""
        return cls(*zip(*map(itemgetter(*cls._fields), map(json.loads, texts)), strict=True))


def with_nothing(rules: Sequence[str]) -> list[str]:
    """Return the rules of ranks; ranks with one rule share what any of them saw of microbatches without targets."""
    seen = ("is_clamped", "is_guarded")
    read = [json.loads(text) if text else {} for text in rules]
    bare = [{name: value for name, value in one.items() if name not in seen} for one in read]
    found = []
    for mine in bare:
        alike = [one for one, its in zip(read, bare, strict=True) if its == mine]
        found.append(json.dumps(mine | {name: any(map(itemgetter(name), alike)) for name in seen}) if mine else "")
    return found


def rule_of(text: str) -> LossWeight:
    """Return the loss rule that a rank has found."""
    data = json.loads(text)
    data.pop("of_each")
    return LossWeight(**{**data, "over": Over(data["over"])})


def rule_in_words(text: str) -> str:
    """Return the loss rule that a rank has found, in words."""
    of_each = json.loads(text)["of_each"]
    return f"{rule_of(text)}" + "".join(f", {each:g} for each sample" for each in of_each if each is not None)


def why_uneven(of_each: Sequence[str]) -> str:
    """Return why samples have different weights on different ranks, in words; "": they have the same."""
    found = {text: rank for rank, text in reversed([*enumerate(of_each)]) if any(json.loads(text))}
    told = " and ".join(f"{text} on rank {rank}" for text, rank in found.items())
    return f"a sample weighs {told}" if len(found) > 1 else ""
