"""Cost model of the simulator: times of instructions and sizes of values.

A costs file is JSON, in one unit of time that it names:

    {"unit": "ms", "forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337, "p2p": 0.601,
     "optimizer": 4.1, "activation": 1.0, "microbatches": [1, 0.5, 2, 0.5]}

Permanent state (`weights`, `gradients`, `optimizer_state`) is in the activations' unit of memory, and is the amount of
a rank without sharding.

A scalar is for the layers of a whole rank, so that a chunk costs 1/chunks of it; a list has one value per stage, used
unchanged. Costs per slice, such as a forward's, are 1/slices of a scalar. Costs per microbatch may differ between
microbatches and slices, by factors. The forms of costs, and of wires between ranks, are in `cost_forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from quintsched.errors import InputError, counted
from quintsched.files.user_records import RecordMetaclass, read_record
from quintsched.ir.instruction_columns import Amounts, Ints
from quintsched.simulation.cost_forms import (
    Bandwidth,
    Cost,
    Factor,
    MicrobatchCost,
    PerMicrobatch,
    PerStage,
    PerStageShare,
    PerUnit,
    Pieces,
    UnitCost,
    WireCost,
    Wires,
)

MOST_COSTS_BYTES = 2**24
"""Maximum number of bytes of a costs file."""


class Counts(Protocol):
    """Numbers of parts into which a step is cut: of a plan's schedule, or of the shape given to a schedule."""

    @property
    def microbatches(self) -> int:
        """Microbatches of the batch."""

    @property
    def chunks(self) -> int:
        """Stages of a rank."""

    @property
    def slices(self) -> int:
        """Slices of a microbatch."""


class Costs(BaseModel, metaclass=RecordMetaclass):
    """Costs of computations, messages and memory: per rank (scalar), per stage (list) or per microbatch (object)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    unit: str = "forward"
    """Name of the unit of all times: "ms", "s", or "forward" for multiples of a forward."""
    microbatches: tuple[Factor, ...] | None = None
    """Factor of each microbatch for times and sizes of computations, exchanges, messages and activations that have no
    factors of their own; None: all 1."""
    slices: tuple[Factor, ...] | None = None
    """Factor of each slice of a microbatch, likewise, but not for `keys`."""
    forward: UnitCost = 1.0
    """Time of a forward."""
    backward_input: UnitCost = 1.0
    """Time of the input half of a backward, which computes the gradient of the input."""
    backward_weight: UnitCost = 1.0
    """Time of the weight half of a backward; a full backward is the sum of the halves."""
    recompute: UnitCost | None = None
    """Time of a recomputed forward; None: that of the forward."""
    exchange: UnitCost = 0.0
    """Time of communication inside a stage (tp, cp and ep) in a forward, beside its computation."""
    exchange_backward: UnitCost | None = None
    """Time of such communication in the input half of a backward (the weight half has none); None: as in forward."""
    p2p: WireCost = 0.0
    """Time of a message of size 1 between two pipeline ranks; or the wires, with `latency` and `bandwidth`."""
    message: UnitCost = 1.0
    """Size of a message with the output of a stage or its gradient; a scalar is used unchanged for every stage."""
    activation_message: UnitCost = 1.0
    """Size of a message with the activations of a microbatch, where a rank lends them to another."""
    host_latency: Cost = 0.0
    """Latency of a copy of activations to host memory or back."""
    host_bandwidth: Bandwidth | None = None
    """Size of activations copied per unit of time, in each direction; None: copies take no time."""
    clip: PerStage = 0.0
    """Time of a stage's gradient norm; all ranks synchronise for it, so that the slowest rank decides."""
    optimizer: PerStage = 0.0
    """Time of a stage's optimizer step."""
    reduce_scatter: PerStage = 0.0
    """Time of the reduce-scatter of a stage's gradients over its replicas."""
    all_gather: PerStage = 0.0
    """Time of the all-gather of a stage's weights after the sharded step; an all-reduce takes both together."""
    pieces: Pieces = 1.0
    """Number of pieces into which the runtime divides each bucket by bytes (`parallel.bucket_mb`): the first is reduced
    as soon as it is full."""
    gather_params: PerStage = 0.0
    """Time of the all-gather of a stage's weights before a computation (ZeRO-3)."""
    weights: PerStage = 0.0
    """Size of the weights."""
    gradients: PerStage = 0.0
    """Size of their gradients."""
    optimizer_state: PerStage = 0.0
    """Size of their optimizer state."""
    experts: PerStageShare = 0.0
    """Fraction of a stage's weights on a rank that are experts', where ep shards experts."""
    activation: UnitCost = 1.0
    """Size of a microbatch's activations from its forward to the end of its backward."""
    activation_after_input: UnitCost | None = None
    """Size that remains between the halves of a backward; None: all of it."""
    activation_checkpointed: UnitCost = 0.0
    """Size that remains between a forward and its recomputation, on stages that recompute."""
    keys: MicrobatchCost = 0.0
    """Size of the keys and values of a whole microbatch, from the forward of its first slice to the backward of that
    slice; 0 if microbatches are not cut into slices."""

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a costs file; raises `UsageError` (missing) or `InputError` (broken), with the place."""
        return read_record(cls, path, MOST_COSTS_BYTES, "the costs file")

    def check_fits(self, counts: Counts, num_stages: int, num_ranks: int) -> None:
        """Raise `InputError`, with a JSON pointer, for a list of a wrong length, or a rank that is out of range."""
        for fault, has in self._misfits(counts, num_stages, num_ranks):
            raise InputError(f"costs: {fault}, but the plan has {has}")

    def _misfits(self, counts: Counts, num_stages: int, num_ranks: int) -> Iterator[tuple[str, str]]:
        lengths = {"stages": num_stages, "microbatches": counts.microbatches, "slices": counts.slices}
        lengths["units"] = counts.microbatches * counts.slices
        for name, value in self:
            if name in lengths:
                lists = [(f"/{name}", name, value)]
            elif isinstance(value, PerMicrobatch):
                lists = [(f"/{name}/{what}", what, own) for what, own in value]
            else:
                lists = [(f"/{name}", "stages", value)]
            cells = value.cells if isinstance(value, PerUnit) else None
            lists = [one for one in lists if one[1] != "cells"]
            lists += [] if cells is None else [(f"/{name}/cells", "stages", cells)]
            lists += [(f"/{name}/cells/{at}", "units", row) for at, row in enumerate(cells or ())]
            for place, what, values in lists:
                if isinstance(values, tuple) and len(values) != lengths[what]:
                    yield f"{place} has {counted(len(values), 'value')}", f"{lengths[what]} {what}"
        if isinstance(self.p2p, Wires):
            yield from (
                (f"/p2p{fault}", f"{counted(num_ranks, 'pipeline rank')}") for fault in self.p2p.misfits(num_ranks)
            )

    def of_stage(self, name: str, stage: int, chunks: int, slices: int) -> float:
        """Cost of an item that exists or is done once per stage, times chunks x slices: whole numbers stay exact."""
        value = self._of_stages(name)
        return float(value[stage]) * chunks * slices if isinstance(value, tuple) else float(value) * slices

    def with_stages(self, change: Callable[[str, PerStage], PerStage]) -> Costs:
        """Return these costs with each scalar or list of stages replaced by `change(name, value)`."""
        found: dict[str, object] = {}
        for name, value in self:
            if isinstance(value, PerMicrobatch):
                found[name] = value.model_copy(update={"stages": change(name, value.stages)})
            elif value is not None and name not in NOT_OF_STAGES:
                found[name] = change(name, value)
        return self.model_copy(update=found)

    def spread(self, shares: Sequence[float], slices: int) -> Costs:
        """Return these costs with the scalars for a whole rank spread over stages, one value for each.

        `shares` gives each stage's share, in ranks' worth of layers; if it is empty, the costs are unchanged.
        """

        def per_stage(name: str, value: PerStage) -> PerStage:
            if isinstance(value, tuple) or name in TAKEN_AS_IT_IS:
                return value
            parts = slices if name in PER_UNIT else 1
            return tuple(value * share / parts for share in shares)

        return self.with_stages(per_stage) if shares else self

    def of_units(self, name: str, stages: Ints, units: Ints, counts: Counts) -> Amounts:
        """Costs of computations, one entry each, times chunks x slices likewise."""
        each = self._of_each(name, stages, units, counts)
        return each * (counts.chunks * counts.slices) if isinstance(self._of_stages(name), tuple) else each

    def of_microbatches(self, name: str, stages: Ints, microbatches: Ints, counts: Counts) -> Amounts:
        """Costs of items that exist or are done once per microbatch, one entry per stage and microbatch, likewise."""
        each = self._of_each(name, stages, microbatches, counts) * counts.slices
        return each * counts.chunks if isinstance(self._of_stages(name), tuple) else each

    @property
    def message_time(self) -> float | None:
        """Time of every message; None if messages may differ."""
        if isinstance(self.p2p, Wires) or isinstance(self.message, tuple | PerUnit):
            return None
        return None if self.microbatches or self.slices else self.p2p * self.message

    def message_times(self, stages: Ints, units: Ints, sources: Ints, destinations: Ints, counts: Counts) -> Amounts:
        """Times of messages; `stages` are those whose outputs, or the gradients of these, they carry."""
        return self.transfer_times(self.message_sizes(stages, units, counts), sources, destinations)

    def transfer_times(self, sizes: Amounts, sources: Ints, destinations: Ints) -> Amounts:
        """Times of messages of these sizes between pipeline ranks."""
        if not isinstance(self.p2p, Wires):
            return self.p2p * sizes
        num_ranks = int(max(sources.max(initial=0), destinations.max(initial=0))) + 1
        pairs, which = np.unique(sources * num_ranks + destinations, return_inverse=True)
        latencies, bandwidths = self.p2p.between(*np.divmod(pairs, num_ranks))
        times: Amounts = latencies[which] + sizes / bandwidths[which]
        return times

    def message_sizes(self, stages: Ints, units: Ints, counts: Counts) -> Amounts:
        """Sizes of messages; arguments as for `message_times`."""
        return self._of_each("message", stages, units, counts)

    def _of_each(self, name: str, stages: Ints, units: Ints, counts: Counts) -> Amounts:
        """Return the values of a cost with their factors, in the units of the file."""
        value, factors = self._of_stages(name), self.factors(name, counts)
        each: Amounts = np.array(value)[stages] if isinstance(value, tuple) else np.full(len(stages), float(value))
        own = self._of(name)
        if isinstance(own, PerUnit) and own.cells is not None:
            each = each * np.array(own.cells)[stages, units]
        return each if factors is None else each * factors[units]

    def factors(self, name: str, counts: Counts) -> Amounts | None:
        """Factors of a cost per unit (of `keys`: per microbatch); None if all are 1."""
        value = self._of(name)
        microbatches = (value.microbatches if isinstance(value, PerMicrobatch) else None) or self.microbatches
        slices = (value.slices if isinstance(value, PerUnit) else None) or self.slices
        if name == "keys":
            return None if microbatches is None else np.array(microbatches)
        if microbatches is None and slices is None:
            return None
        return np.outer(microbatches or [1.0] * counts.microbatches, slices or [1.0] * counts.slices).ravel()

    def pieces_of(self, stage: int) -> float:
        """Number of pieces of each bucket of a stage."""
        return self.pieces[stage] if isinstance(self.pieces, tuple) else self.pieces

    def experts_of(self, stage: int) -> float:
        """Fraction of a stage's weights that are experts'."""
        return self.experts[stage] if isinstance(self.experts, tuple) else self.experts

    def _of_stages(self, name: str) -> PerStage:
        value = self._of(name)
        return value.stages if isinstance(value, PerMicrobatch) else value

    def _of(self, name: str) -> UnitCost | MicrobatchCost:
        value: UnitCost | MicrobatchCost | None = getattr(self, name)
        return getattr(self, INSTEAD[name]) if value is None else value


NOT_OF_STAGES = frozenset({"unit", "microbatches", "slices", "p2p", "host_latency", "host_bandwidth"})
"""Fields without a value per stage."""

TAKEN_AS_IT_IS = frozenset({"message", "experts", "pieces"})
"""Scalars that do not scale with the share of the model in a stage."""

PER_UNIT = frozenset(
    {"forward", "backward_input", "backward_weight", "recompute", "exchange", "exchange_backward"}
    | {"activation", "activation_after_input", "activation_checkpointed"}
)
"""Costs that are incurred for each slice; all others of a stage are incurred once."""

INSTEAD = {"recompute": "forward", "exchange_backward": "exchange", "activation_after_input": "activation"}
"""Costs that replace those left out."""
