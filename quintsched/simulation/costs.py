"""How long instructions take and what they hold: the cost model of the simulator.

A costs file is JSON, in one unit of time that it names:

    {"unit": "ms", "forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337, "p2p": 0.601,
     "optimizer": 4.1, "activation": 1.0, "microbatches": [1, 0.5, 2, 0.5]}

What stands for good (`weights`, `gradients`, `optimizer_state`) is in the activations' unit of memory, and what a rank
holds where nothing is shared out.

A scalar is for a whole rank's worth of layers, so that a chunk costs 1/chunks of it; a list has one value per
stage, taken as it is. What is done once per slice, like a forward, costs 1/slices of a scalar. Whatever is done or held
per microbatch may differ from one to the next, and from slice to slice: then it is that times a factor. The forms of
costs, and of wires between ranks, are in `cost_forms`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from quintsched.errors import InputError
from quintsched.files.atomic import read_whole
from quintsched.files.records import Named
from quintsched.files.strictjson import describe_faults, parse_strict
from quintsched.ir.columns import Amounts, Ints
from quintsched.simulation.cost_forms import (
    Bandwidth,
    Cost,
    Factor,
    MicrobatchCost,
    PerMicrobatch,
    PerStage,
    PerStageShare,
    PerUnit,
    UnitCost,
    WireCost,
    Wires,
)

MAX_BYTES = 2**24
"""Of a costs file."""


class Counts(Protocol):
    """Into how many parts a step is cut: a plan's schedule, or the shape that one is asked for."""

    @property
    def microbatches(self) -> int:
        """Of the batch."""

    @property
    def chunks(self) -> int:
        """Stages of a rank."""

    @property
    def slices(self) -> int:
        """Of a microbatch."""


class Costs(BaseModel, metaclass=Named):
    """Costs of a rank's computations (scalar), of each stage's (one value per stage), or of each microbatch's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    unit: str = "forward"
    """The unit of all times, for people: "ms", "s", or "forward" for multiples of a forward."""
    microbatches: tuple[Factor, ...] | None = None
    """How many times as much as usual each microbatch takes and holds, in computations, exchanges, messages and
    activations that do not say it themselves; None: all are alike."""
    slices: tuple[Factor, ...] | None = None
    """The same of each slice of a microbatch, but for `keys`."""
    forward: UnitCost = 1.0
    """A forward."""
    backward_input: UnitCost = 1.0
    """The half of a backward that makes the input's gradient."""
    backward_weight: UnitCost = 1.0
    """The half of a backward that makes the weights' gradient; a full backward is the sum of the halves."""
    recompute: UnitCost | None = None
    """A forward run again, where activations were dropped; None: what the forward takes."""
    exchange: UnitCost = 0.0
    """Communication inside a stage (of tp, cp and ep) in a forward, beside its computation."""
    exchange_backward: UnitCost | None = None
    """That in the input half of a backward; None: what the forward's takes. There is none in the weight half."""
    p2p: WireCost = 0.0
    """A message between two pipeline ranks that holds 1; or the wires between them, in `latency` and `bandwidth`."""
    message: UnitCost = 1.0
    """What a message with the output of a stage holds, and one with its gradient; a scalar is taken as it is."""
    host_latency: Cost = 0.0
    """What any copy of activations to the host's memory, or back, takes besides."""
    host_bandwidth: Bandwidth | None = None
    """How much of the activations such a copy moves in a unit of time, each way; None: copies take no time."""
    clip: PerStage = 0.0
    """The gradient norm of a stage; all ranks meet for it, so that the one with the most to do decides."""
    optimizer: PerStage = 0.0
    """The optimizer's step of a stage."""
    reduce_scatter: PerStage = 0.0
    """Adding up a stage's gradients over its replicas, each of which keeps a share of the sum."""
    all_gather: PerStage = 0.0
    """Gathering a stage's weights from the shares that were stepped; an all-reduce is a reduce-scatter and this."""
    gather_params: PerStage = 0.0
    """Gathering a stage's weights for a computation."""
    weights: PerStage = 0.0
    """What the weights hold in memory."""
    gradients: PerStage = 0.0
    """What their gradients hold."""
    optimizer_state: PerStage = 0.0
    """What the optimizer keeps of them."""
    experts: PerStageShare = 0.0
    """Which share of a stage's weights on a rank are experts', where ep shares them out."""
    activation: UnitCost = 1.0
    """What a microbatch holds in memory from its forward to the end of its backward."""
    activation_after_input: UnitCost | None = None
    """What of it still stands between the halves of a backward; None: all of it."""
    activation_checkpointed: UnitCost = 0.0
    """What stands of it between a forward and its recomputation, on stages that are recomputed."""
    keys: MicrobatchCost = 0.0
    """What the keys and values of a whole microbatch hold, from the forward of its first slice to the backward of that
    slice; nothing where microbatches are not cut into slices."""

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a costs file; raises `UsageError` (missing) or `InputError` (broken), saying where."""
        text = read_whole(path, MAX_BYTES, "the costs file")
        try:
            return cls.model_validate_json(json.dumps(parse_strict(text)))
        except ValidationError as error:
            raise InputError(f"{path}: {describe_faults(error)}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def check_fits(self, counts: Counts, num_stages: int, num_ranks: int) -> None:
        """Raise `InputError`, with a JSON pointer, for a list of another length than the plan has, or other ranks."""
        for fault, has in self._misfits(counts, num_stages, num_ranks):
            raise InputError(f"costs: {fault}, but the plan has {has}")

    def _misfits(self, counts: Counts, num_stages: int, num_ranks: int) -> Iterator[tuple[str, str]]:
        lengths = {"stages": num_stages, "microbatches": counts.microbatches, "slices": counts.slices}
        for name, value in self:
            if name in lengths:
                lists = [(f"/{name}", name, value)]
            elif isinstance(value, PerMicrobatch):
                lists = [(f"/{name}/{what}", what, own) for what, own in value]
            else:
                lists = [(f"/{name}", "stages", value)]
            for place, what, values in lists:
                if isinstance(values, tuple) and len(values) != lengths[what]:
                    yield f"{place} has {len(values)} values", f"{lengths[what]} {what}"
        if isinstance(self.p2p, Wires):
            yield from ((f"/p2p{fault}", f"{num_ranks} pipeline ranks") for fault in self.p2p.misfits(num_ranks))

    def of_stage(self, name: str, stage: int, chunks: int, slices: int) -> float:
        """What is there or done once for a whole `stage` costs, times chunks x slices: so whole numbers stay exact."""
        value = self._of_stages(name)
        return float(value[stage]) * chunks * slices if isinstance(value, tuple) else float(value) * slices

    def with_stages(self, change: Callable[[str, PerStage], PerStage]) -> Costs:
        """Return these costs with each one's scalar or list of stages changed: (name, value) → the value instead."""
        found: dict[str, object] = {}
        for name, value in self:
            if isinstance(value, PerMicrobatch):
                found[name] = value.model_copy(update={"stages": change(name, value.stages)})
            elif value is not None and name not in _NOT_OF_STAGES:
                found[name] = change(name, value)
        return self.model_copy(update=found)

    def spread(self, shares: Sequence[float], slices: int) -> Costs:
        """Return these costs with what is for a whole rank's worth of layers spread over stages, a value for each.

        `shares` says how much of a rank's worth each stage is; where it is empty, the costs stay as they are.
        """

        def per_stage(name: str, value: PerStage) -> PerStage:
            if isinstance(value, tuple) or name in _TAKEN_AS_IT_IS:
                return value
            parts = slices if name in _PER_UNIT else 1
            return tuple(value * share / parts for share in shares)

        return self.with_stages(per_stage) if shares else self

    def of_units(self, name: str, stages: Ints, units: Ints, counts: Counts) -> Amounts:
        """What computations cost, an entry per computation, times chunks x slices likewise."""
        each = self._of_each(name, stages, units, counts)
        return each * (counts.chunks * counts.slices) if isinstance(self._of_stages(name), tuple) else each

    def of_microbatches(self, name: str, stages: Ints, microbatches: Ints, counts: Counts) -> Amounts:
        """What is there or done once per microbatch costs, an entry per stage and microbatch, likewise."""
        each = self._of_each(name, stages, microbatches, counts) * counts.slices
        return each * counts.chunks if isinstance(self._of_stages(name), tuple) else each

    @property
    def message_time(self) -> float | None:
        """How long every message is under way; None where they may differ."""
        if isinstance(self.p2p, Wires) or isinstance(self.message, tuple | PerUnit):
            return None
        return None if self.microbatches or self.slices else self.p2p * self.message

    def message_times(self, stages: Ints, units: Ints, sources: Ints, destinations: Ints, counts: Counts) -> Amounts:
        """How long messages are under way; `stages` are those whose outputs, or the gradients of these, they hold."""
        sizes = self._of_each("message", stages, units, counts)
        if not isinstance(self.p2p, Wires):
            return self.p2p * sizes
        num_ranks = int(max(sources.max(initial=0), destinations.max(initial=0))) + 1
        pairs, which = np.unique(sources * num_ranks + destinations, return_inverse=True)
        latencies, bandwidths = self.p2p.between(*np.divmod(pairs, num_ranks))
        times: Amounts = latencies[which] + sizes / bandwidths[which]
        return times

    def _of_each(self, name: str, stages: Ints, units: Ints, counts: Counts) -> Amounts:
        """Return the values of a cost with their factors, as they stand in the file."""
        value, factors = self._of_stages(name), self.factors(name, counts)
        each: Amounts = np.array(value)[stages] if isinstance(value, tuple) else np.full(len(stages), float(value))
        return each if factors is None else each * factors[units]

    def factors(self, name: str, counts: Counts) -> Amounts | None:
        """How many times as much as usual each unit costs (of `keys`: each microbatch); None where all are alike."""
        value = self._of(name)
        microbatches = (value.microbatches if isinstance(value, PerMicrobatch) else None) or self.microbatches
        slices = (value.slices if isinstance(value, PerUnit) else None) or self.slices
        if name == "keys":
            return None if microbatches is None else np.array(microbatches)
        if microbatches is None and slices is None:
            return None
        return np.outer(microbatches or [1.0] * counts.microbatches, slices or [1.0] * counts.slices).ravel()

    def experts_of(self, stage: int) -> float:
        """The share of a stage's weights that are experts'."""
        return self.experts[stage] if isinstance(self.experts, tuple) else self.experts

    def _of_stages(self, name: str) -> PerStage:
        value = self._of(name)
        return value.stages if isinstance(value, PerMicrobatch) else value

    def _of(self, name: str) -> UnitCost | MicrobatchCost:
        value: UnitCost | MicrobatchCost | None = getattr(self, name)
        return getattr(self, _INSTEAD[name]) if value is None else value


_NOT_OF_STAGES = frozenset({"unit", "microbatches", "slices", "p2p", "host_latency", "host_bandwidth"})
"""What says nothing of stages."""

_TAKEN_AS_IT_IS = frozenset({"message", "experts"})
"""What of a scalar does not depend on how much of the model a stage is."""

_PER_UNIT = frozenset(
    {"forward", "backward_input", "backward_weight", "recompute", "exchange", "exchange_backward"}
    | {"activation", "activation_after_input", "activation_checkpointed"}
)
"""What costs anew for each slice; all else of a stage is there, or done, once."""

_INSTEAD = {"recompute": "forward", "exchange_backward": "exchange", "activation_after_input": "activation"}
"""Which cost stands for one that is not given."""
