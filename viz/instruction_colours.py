"""Names, colours and marks of instructions and messages in all pictures.

Colours are from the Okabe-Ito palette, distinct for all kinds of colour vision. No matplotlib here.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.ir.dataflow_analysis import ValueKind
from quintsched.ir.instruction_set import (
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    FetchAct,
    FreeParams,
    Fwd,
    GatherParams,
    Instruction,
    OffloadAct,
    OptStep,
    Recompute,
    ReduceScatterBucket,
    ShareMetrics,
    SyncTied,
)
from quintsched.simulation.idle_time import COMPUTING_TIME, EXCHANGES, OTHERS

from .collective_scene import Added, Stored

INK = "#1F2933"


@dataclass(frozen=True)
class Look:
    """Style of one class of instruction or value."""

    label: str
    colour: str
    marker: str = "s"


LOOKS: dict[type[Instruction], Look] = {
    Fwd: Look("forward", "#0072B2"),
    Bwd: Look("backward", "#D55E00"),
    BwdInput: Look("input gradient", "#E69F00"),
    BwdWeight: Look("weight gradient", "#009E73"),
    Recompute: Look("recomputation", "#8C6BB1"),
    Added: Look("chunk arrives and is added", "#0072B2"),
    Stored: Look("chunk arrives and is stored", "#E69F00"),
    SyncTied: Look("tied gradients added up", "#000000", "s"),
    AllReduceBucket: Look("gradients reduced", "#009E73", "D"),
    ReduceScatterBucket: Look("gradients reduced, shards kept", "#009E73", "d"),
    OffloadAct: Look("activations to the host", "#7A5195", "<"),
    FetchAct: Look("activations fetched", "#2F7F86", "p"),
    GatherParams: Look("weights gathered", "#882255", "^"),
    FreeParams: Look("weights dropped", "#C48AA5", ">"),
    ShareMetrics: Look("metrics shared", "#CC79A7", "o"),
    ClipGrad: Look("global norm", "#56B4E9", "v"),
    OptStep: Look("optimizer step", INK, "*"),
    AllGatherBucket: Look("stepped weights gathered", "#882255", "P"),
}
"""Styles in the order of legends; other classes are shown in grey, with their class name."""

CARGO: dict[ValueKind, Look] = {
    ValueKind.OUTPUT: Look("activation sent", "#2B6C99"),
    ValueKind.OUTPUT_GRAD: Look("gradient sent", "#B3541E"),
    ValueKind.SKIP: Look("skip sent", "#5AA6D6"),
    ValueKind.SKIP_GRAD: Look("gradient of a skip sent", "#E3A27B"),
    ValueKind.SAVED: Look("activations lent", "#7A5195"),
    ValueKind.LENT: Look("activations returned", "#2F7F86"),
}


CAUSE_COLOURS = {
    "warm-up": "#8a6d3b",
    "cool-down": "#5b7f95",
    "imbalance": "#b3541e",
    "message": "#2b6c99",
    "order": "#7a5195",
    "cap": "#a0204c",
    "collective": "#1f5135",
}
"""Colours of the causes of idle time."""

WORKING_COLOURS = {COMPUTING_TIME: "#A9B4BF", EXCHANGES: "#6C7A89", OTHERS: "#D5DAE0"}
"""Colours of the parts of a rank's time in which it runs something."""


def look_of(what: type[Instruction]) -> Look:
    """Return the style of a class of instruction."""
    return LOOKS.get(what) or Look(what.__name__, "#7A7A7A")
