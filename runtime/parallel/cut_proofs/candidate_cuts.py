"""Candidate ways to cut a column/row pair, which are tried in order until one proves equivalent.

layouts   parts 3          [ q | k | v ]                       parts 2   [ gate | up ]
          parts 1          [ q0 k0 v0 | q1 k1 v1 | … ]         parts 1   [ gate0 up0 | gate1 up1 | … ]
          parts (2, 1, 1)  [ q q | k | v ], fewer keys than queries
sizes     num_heads        and attributes equal to the width of a column or row; config.num_heads; none
alone     each layer takes and returns full tensors: equivalent whatever modules are between them
whole     not cut
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd

from ...settings.tensor_parallel_rules import FusedParts, TensorSplit
from ..tensor.cut_rules import RuleData
from ..tensor.cuttable_layers import Cut, cut_width, sizes_of
from ..tensor.known_layer_name_pairs import configured_heads_of, widths_of

CandidateRules = dict[str, RuleData]
"""Rules for the layers of one pair, by their names in the whole model."""


def replicated(cuts: Iterable[Cut]) -> CandidateRules:
    """Return rules that keep layers whole."""
    return {cut.path: TensorSplit.REPLICATE.value for cut in cuts}


def alone(cuts: Iterable[Cut]) -> CandidateRules:
    """Return rules by which each layer takes and returns full tensors."""
    return {
        cut.path: {"cut": cut.split.value, "alone": True}
        if cut.split in (TensorSplit.COLUMN, TensorSplit.ROW)
        else cut.split.value
        for cut in cuts
    }


def ways_of(pair: Sequence[Cut], *, is_asked: bool) -> list[CandidateRules]:
    """Return the candidate ways for a pair, the assumed one first.

    `is_asked`: a rule demands the cut, so the pair must be neither parted nor kept whole.
    """
    ways = paired_ways(pair) if pair[0].is_paired else [{}]
    return ways if is_asked else [*ways, *([alone(pair)] if pair[0].is_paired else []), replicated(pair)]


def paired_ways(pair: Sequence[Cut], *, all_of_them: bool = False) -> list[CandidateRules]:
    """Return all combinations of layouts of fused columns with sets of size attributes to divide.

    If a rule sets the layout, only that one, unless `all_of_them` are wanted.
    """
    layouts, sizes = _layouts(pair, all_of_them=all_of_them), _sizes(pair)
    ways: list[CandidateRules] = [
        {cut.path: _rule(cut, parts, of_sizes if of_sizes != sizes[0] else None) for cut in pair}
        for of_sizes in sizes
        for parts in layouts
    ]
    return [{}, *ways[1:]] if not all_of_them else ways


def _rule(cut: Cut, parts: FusedParts | None, sizes: tuple[str, ...] | None) -> RuleData:
    rule: dict[str, object] = {"cut": cut.split.value}
    if cut.split is TensorSplit.COLUMN:
        told = cut.parts if parts is None else parts
        if told != 1 or parts is not None:
            rule["parts"] = list(told) if isinstance(told, tuple) else told
        if sizes is not None:
            rule["sizes"] = list(sizes)
    return rule if len(rule) > 1 else cut.split.value


def _layouts(pair: Sequence[Cut], *, all_of_them: bool) -> list[FusedParts | None]:
    """Return candidate `parts` of a pair's fused column; [None], the assumed ones, for several columns."""
    columns = [cut for cut in pair if cut.split is TensorSplit.COLUMN]
    columns = [cut for cut in columns if ".lora_" not in cut.path] or columns
    row = next(cut for cut in pair if cut.split is TensorSplit.ROW)
    total, width = cut_width(columns[0]), cut_width(row)
    is_fused = len(columns) == 1 and (total != width or all_of_them)
    if not is_fused or (columns[0].is_told and not all_of_them):
        return [None]
    found: list[FusedParts] = [columns[0].parts, 1]
    if total % width == 0 and total > width:
        found.append(total // width)
    if width < total < 3 * width and (total - width) % 2 == 0:
        rest = (total - width) // 2
        unit = gcd(width, rest)
        found.append((width // unit, rest // unit, rest // unit))
    return list(dict.fromkeys(found))


def _sizes(pair: Sequence[Cut]) -> list[tuple[str, ...]]:
    """Return candidate sets of attributes of the owner modules to divide."""
    assumed, owners = pair[0].divides, pair[0].owners
    widths = {size for cut in pair for size in sizes_of(cut.layer)[:: 1 if cut.split is TensorSplit.ROW else -1][:1]}
    wide, configured = widths_of(owners, widths | _widths_within(pair)), configured_heads_of(owners)
    options = [assumed, (*assumed, *wide), (*assumed, *configured), (*assumed, *wide, *configured), ()]
    return list(dict.fromkeys(options))


def _widths_within(pair: Sequence[Cut]) -> set[int]:
    """Return the widths of the fused blocks of a pair's column: the row's, and half the rest for keys and values."""
    columns = [cut for cut in pair if cut.split is TensorSplit.COLUMN]
    columns = [cut for cut in columns if ".lora_" not in cut.path] or columns
    row = next(cut for cut in pair if cut.split is TensorSplit.ROW)
    width, rest = cut_width(row), cut_width(columns[0]) - cut_width(row)
    return {width, rest // 2} if len(columns) == 1 and rest > 1 else {width}


def renumbered(path: str, number: int) -> str:
    """Return the name of the same layer in block `number`."""
    _, dot, rest = path.partition(".")
    return f"{number}{dot}{rest}"


def everywhere(rules: Mapping[str, RuleData]) -> dict[str, RuleData]:
    """Return rules with the block's number replaced by "*": for the layers of these names in all blocks."""
    return {(renumbered(path, 0).replace("0", "*", 1) if "." in path else path): rule for path, rule in rules.items()}
