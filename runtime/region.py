"""The region between a column layer and its row layer, where each rank has a share of the features.

    tokens whole ──▶ column ──▶ [ region: open ] ──▶ row ──▶ tokens whole

Column and row note whether a forward is inside; what stands there and has to know (a dropout, whose mask belongs to
this rank's features) looks it up.
"""

from __future__ import annotations

from dataclasses import dataclass

from .transport import Group


@dataclass
class Region:
    """One column/row pair's region on this rank, cut over `group`."""

    group: Group
    is_open: bool = False
