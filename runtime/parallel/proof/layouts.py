"""In which ways the outputs of a fused layer may be laid out: what is tried, and kept where it proves.

parts 3          [ q | k | v ]                       parts 2   [ gate | up ]
parts 1          [ q0 k0 v0 | q1 k1 v1 | … ]         parts 1   [ gate0 up0 | gate1 up1 | … ]
parts (2, 1, 1)  [ q q | k | v ], fewer keys than queries
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ...job.choices import TensorSplit
from ...job.tensor_rules import Parts
from ..tensor.rules import Cut, RuleData, cut_width


def layouts_of(pair: Sequence[Cut], *, all_of_them: bool = False) -> list[dict[str, RuleData]]:
    """Return in which ways the fused outputs of a pair's column may be laid out, the assumed one first, as rules.

    Layers side by side, and those of which a rule told the layout, have one way, unless `all_of_them` are wanted.
    """
    columns = [cut for cut in pair if cut.split is TensorSplit.COLUMN and cut.is_paired]
    row = next((cut for cut in pair if cut.split is TensorSplit.ROW), None)
    fused = [c for c in columns if c.parts != 1 or all_of_them]
    if len(fused) != 1 or row is None or (fused[0].is_told and not all_of_them):
        return []
    column, total, width = fused[0], cut_width(fused[0]), cut_width(row)
    ways: list[Parts] = [column.parts, 1]
    if total % width == 0 and total > width:
        ways.append(total // width)
    if width < total < 3 * width and (total - width) % 2 == 0:
        rest = (total - width) // 2
        unit = gcd(width, rest)
        ways.append((width // unit, rest // unit, rest // unit))
    told = {row.path: TensorSplit.ROW.value}
    return [
        {column.path: {"cut": TensorSplit.COLUMN.value, "parts": list(p) if isinstance(p, tuple) else p}, **told}
        for p in dict.fromkeys(ways)
    ]
