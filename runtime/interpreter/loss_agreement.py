"""What ranks tell each other of the loss and the metrics, as they agree on what these are over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from ..examine.losses.loss_weights import LossWeight, Over


class Told(NamedTuple):
    """What ranks say of the loss and the metrics, in order; `of_any`: what is refused of one microbatch as well."""

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
    def of(cls, texts: Sequence[str]) -> Told:
        """Return what ranks say in texts."""
        return cls(*zip(*map(itemgetter(*cls._fields), map(json.loads, texts)), strict=True))


def with_nothing(rules: Sequence[str]) -> list[str]:
    """Return what ranks have found, all of one rule with what any of them has seen of microbatches of nothing."""
    seen = ("is_clamped", "is_guarded")
    read = [json.loads(text) if text else {} for text in rules]
    bare = [{name: value for name, value in one.items() if name not in seen} for one in read]
    found = []
    for mine in bare:
        alike = [one for one, its in zip(read, bare, strict=True) if its == mine]
        found.append(json.dumps(mine | {name: any(map(itemgetter(name), alike)) for name in seen}) if mine else "")
    return found


def rule_of(text: str) -> LossWeight:
    """Return what a rank has found."""
    data = json.loads(text)
    data.pop("of_each")
    return LossWeight(**{**data, "over": Over(data["over"])})


def rule_in_words(text: str) -> str:
    """Return what a rank has found, in words."""
    of_each = json.loads(text)["of_each"]
    return f"{rule_of(text)}" + "".join(f", {each:g} for each sample" for each in of_each if each is not None)


def why_uneven(of_each: Sequence[str]) -> str:
    """Return why samples do not weigh alike, by what each rank has found that one weighs; "": they do."""
    found = {text: rank for rank, text in reversed([*enumerate(of_each)]) if any(json.loads(text))}
    told = " and ".join(f"{text} on rank {rank}" for text, rank in found.items())
    return f"a sample weighs {told}" if len(found) > 1 else ""
