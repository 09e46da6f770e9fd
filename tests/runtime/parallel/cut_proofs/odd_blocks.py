"""All odd blocks by name, and what is known of them: which are cut in pairs, and which look at other tokens."""

from __future__ import annotations

from torch import nn

from .odd_attentions import ODD_ATTENTIONS
from .odd_mlps import ODD_MLPS

ODD: dict[str, type[nn.Module]] = {**ODD_MLPS, **ODD_ATTENTIONS}

PAIRED = {
    *("LayerNormBetween", "SlopeBetween", "PReLUBetween", "InPlaceBetween", "TwiceUsed", "Recurrent", "Gates"),
    *("GatesInTurns", "PerHeadNorms", "WideNorms", "GroupedQueries", "CountedHeads", "Flat", "Parallel", "Turned"),
    *("Bert", "Mixture", "Adapted", "Fused", "NeoX", "MegatronGroups", "Phi3", "Configured"),
}
"""Blocks that can be cut in pairs at tp=2."""

BLIND = {
    *ODD_ATTENTIONS,
    *("GroupNormBetween", "InstanceNormBetween", "TokensMixed", "ConvolvedTokens", "ConvolvedOutside", "Pooled"),
    *("Shifted", "Positioned", "Summed"),
}
"""Blocks that read other tokens than the current one, and support no slices."""

COUNTING = {"SpectralNormed"}
"""Blocks whose buffers each forward changes."""
