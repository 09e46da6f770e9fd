"""All odd blocks, and what is known of them: which are cut in pairs, and which look at other tokens."""

from __future__ import annotations

from torch import nn

from . import odd_attentions, odd_mlps
from .odd_attentions import (
    Adapted,
    Attention,
    Bert,
    CountedHeads,
    Flat,
    GroupedQueries,
    Parallel,
    PerHeadNorms,
    Turned,
    WideNorms,
)
from .odd_mlps import (
    ConvolvedOutside,
    ConvolvedTokens,
    Gates,
    GatesInTurns,
    GroupNormBetween,
    InPlaceBetween,
    InstanceNormBetween,
    LayerNormBetween,
    Mixture,
    Pooled,
    Positioned,
    PReLUBetween,
    Recurrent,
    Shifted,
    SlopeBetween,
    SpectralNormed,
    Summed,
    TokensMixed,
    TwiceUsed,
)

PAIRED = {
    LayerNormBetween, SlopeBetween, PReLUBetween, InPlaceBetween, TwiceUsed, Recurrent, Gates,
    GatesInTurns, PerHeadNorms, WideNorms, GroupedQueries, CountedHeads, Flat, Parallel, Turned, Bert, Mixture, Adapted,
}  # fmt: skip
"""Blocks that can be cut in pairs at tp=2."""

ODD: list[type[nn.Module]] = [
    found
    for module in (odd_mlps, odd_attentions)
    for name, found in vars(module).items()
    if isinstance(found, type)
    and issubclass(found, nn.Module)
    and found.__module__ == module.__name__
    and name not in ("Mlp", "Attention", "Conv1D", "BertSelf", "Adapter")
]

BLIND = {block for block in ODD if issubclass(block, Attention | Bert | Turned)} | {
    GroupNormBetween, InstanceNormBetween, TokensMixed, ConvolvedTokens, ConvolvedOutside, Pooled, Shifted, Positioned,
    Summed,
}  # fmt: skip
"""Blocks that read other tokens than the current one, and support no slices."""

COUNTING = {SpectralNormed}
"""Blocks whose buffers each forward changes."""
