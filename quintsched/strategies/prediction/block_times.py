"""Time of one block on one GPU, and of the communication inside it, for each distinct way to shard it.

    configurations ──▶ distinct keys (tp, cp, ep, sp, microbatch, seq, dtype) ──▶ times of a block ──▶ lookup by key

    host     ▕ launches ▏▕ launches ▏▕ launches ▏         a layer takes the longer of the two, forward and backward
    device     ▕ layer ▏   ▕ layer ▏   ▕ layer ▏          each by itself: the host runs ahead of the device

A search has millions of strategies and only hundreds of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import SHORT
from quintsched.strategies.prediction import operators
from quintsched.strategies.prediction.operator_device_times import Times, launch_s, launches, operator_times
from quintsched.strategies.prediction.operators import Array, BlockSizes, Operator, Product
from quintsched.strategies.prediction.predicted_collectives import all_reduce_s, exchange_s, message_s, overlap

T = TypeVar("T", bound="ArrayRecord")


class ArrayRecord:
    """Base class of frozen records of arrays, or of such records, that all have one entry per configuration."""

    def take_rows(self: T, index: NDArray[np.int64]) -> T:
        """Return the record with these entries only."""
        return type(self)(**{field.name: _taken(getattr(self, field.name), index) for field in fields(self)})  # type: ignore[arg-type]

    def joined(self: T, other: T) -> T:
        """Return the record with the entries of both."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return type(self)(**{name: _joined(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, eq=False)
class Layer(ArrayRecord):
    """Times of one layer, or of the embedding or the head: seconds of a microbatch on one GPU.

    Communication is the exposed part; `hidden` is the part that overlaps with computation. Times of computation include
    what the device waits for the host's launches.
    """

    forward: Array
    backward_input: Array
    backward_weight: Array
    selective: Array
    """Part of the forward that recomputation of modules runs again."""
    tp_forward: Array
    tp_backward: Array
    tp_hidden: Array
    cp_forward: Array
    cp_backward: Array
    cp_hidden: Array
    ep: Array
    """Exchange of tokens with their experts, in either direction."""
    weights: Array
    """Parameters on a GPU that all replicas hold."""
    expert_weights: Array
    """Parameters on a GPU that differ between the ranks of ep."""


@dataclass(frozen=True, eq=False)
class Blocks(ArrayRecord):
    """Times of a model's kinds of layers, and of its embedding and head."""

    dense: Layer
    mixture: Layer
    first: Layer
    last: Layer


def blocks(model: Model, hardware: Hardware, sizes: BlockSizes, dtype: str) -> Blocks:
    """Return the times of a model's kinds of layers for n sizes, all of one dtype."""
    first, last = operators.embedding(model, sizes), operators.head(model, sizes)
    layer = _LayerTimes(model, hardware, sizes, dtype)
    reduces = 1.0 if model.parallel_block else 2.0  # of outputs, which side by side are added up first
    ends = layer(first, 1.0, 0.0, attends=False, mixes=False)
    layers = [
        layer(operators.block(model, sizes, kind), reduces, float(model.norms), attends=True, mixes=kind.experts)
        for kind in model.kinds
    ]
    return Blocks(
        dense=layers[0],
        mixture=layers[-1],
        first=replace(ends, weights=ends.weights + _looked_up(model, sizes)),
        last=layer(last, 0.0, 1.0, attends=False, mixes=False),
    )


class _LayerTimes:
    """Converter from operators to Layers."""

    def __init__(self, model: Model, hardware: Hardware, sizes: BlockSizes, dtype: str) -> None:
        self.model, self.hardware, self.sizes, self.dtype = model, hardware, sizes, dtype

    def __call__(
        self, found: Sequence[Operator], reduces_forward: float, reduces_backward: float, *, attends: bool, mixes: bool
    ) -> Layer:
        accumulated = self.sizes.accumulated
        times = [operator_times(one, self.hardware, self.dtype, accumulated) for one in found]
        times = [self._rerun(one, time) for one, time in zip(found, times, strict=True)]
        zero = np.zeros_like(self.sizes.tokens)
        total = sum(times, Times(zero, zero, zero, zero))
        cp_forward, cp_backward, cp_hidden = self._context(times, found) if attends else (zero, zero, zero)
        exchange = self._exchange() if mixes else zero  # there and back
        tp_backward, tp_hidden = self._tensor_backward(times, found, reduces_backward)
        tp_forward = reduces_forward * self._reduce()
        waited = exchange * (1 - np.asarray(self.sizes.ep_overlap))
        waits = tp_forward + cp_forward + waited, tp_backward + cp_backward + waited
        total = _launched(
            total,
            sum((self._rerun(one, launches(one)) for one in found), Times(zero, zero, zero, zero)),
            waits,
            self.hardware,
        )
        return Layer(
            forward=total.forward,
            backward_input=total.backward_input,
            backward_weight=total.backward_weight,
            selective=total.selective,
            tp_forward=tp_forward,
            tp_backward=tp_backward,
            tp_hidden=tp_hidden,
            cp_forward=cp_forward,
            cp_backward=cp_backward,
            cp_hidden=cp_hidden,
            ep=exchange,
            weights=sum((_weights(operator) for operator in found if not operator.name.startswith("expert")), zero),
            expert_weights=sum((_weights(operator) for operator in found if operator.name.startswith("expert")), zero),
        )

    def _rerun(self, operator: Operator, times: Times) -> Times:
        """Return the times of an operator, `selective` where its module is recomputed."""
        return replace(times, selective=times.forward * self.sizes.rerun.get(operator.module, 0.0))

    def _tensor_backward(
        self, times: Sequence[Times], found: Sequence[Operator], reduces: float
    ) -> tuple[Array, Array]:
        """Return tp communication in the backward, exposed and hidden, as Megatron-LM runs it.

        The all-reduce of an input's gradient overlaps with the product for the weight gradient. Sequence parallelism
        reduce-scatters it instead, gathers the input once more during the product for the input's gradient, and
        gathers the output's gradient without overlap.
        """
        columns = [time for time, operator in zip(times, found, strict=True) if getattr(operator, "column", False)]
        zero, overlaps = np.zeros_like(self.sizes.tokens), np.asarray(self.sizes.tp_overlap)
        weight = overlaps * sum((time.backward_weight for time in columns), zero)
        inputs = overlaps * sum((time.backward_input for time in columns), zero)
        whole = reduces * self._reduce()
        summed, _ = overlap(whole, weight, self.hardware)
        scattered = overlap(whole / 2, weight, self.hardware)[0] + overlap(whole / 2, inputs, self.hardware)[0]
        scattered = whole / 2 + scattered
        exposed = np.where(self.sizes.sequence_parallel > 0, scattered, summed)
        total = np.where(self.sizes.sequence_parallel > 0, 1.5 * whole, whole)
        return exposed, total - exposed

    def _reduce(self) -> Array:
        """Return the time of an all-reduce of a layer's output over tp; with sequence parallelism, of both halves."""
        sizes = self.sizes
        moved = sizes.tokens * self.model.hidden * sizes.width
        return all_reduce_s(moved, sizes.tp, np.ones_like(sizes.tp), self.hardware)

    def _exchange(self) -> Array:
        """Return the time of sending tokens to their experts over ep, and their results back.

        Each rank of tp sends all tokens to its slices of the experts (`runtime/parallel/expert/moe.py`).
        """
        sizes, experts = self.sizes, self.model.experts
        assert experts is not None
        sent = sizes.tokens * self.model.hidden * SHORT.get(self.dtype, sizes.width)
        made = sizes.tokens * self.model.hidden * sizes.width
        there, back = (
            exchange_s(moved, experts.rows, experts.nodes, sizes.ep, sizes.tp * sizes.cp, self.hardware)
            for moved in (sent, made)
        )
        return there + back

    def _context(self, times: Sequence[Times], found: Sequence[Operator]) -> tuple[Array, Array, Array]:
        """Return exposed forward, exposed backward and hidden time of the cp ring; each hop overlaps with attention."""
        sizes, model = self.sizes, self.model
        passed = model.heads if model.repeated_keys else model.num_kv_heads
        heads = np.maximum(passed / sizes.tp, 1.0)
        block = sizes.tokens * heads * 2 * model.query_width * sizes.width
        hop = message_s(block, sizes.tp * sizes.cp / 2, self.hardware)
        core = [time for time, operator in zip(times, found, strict=True) if operator.module == "core_attn"]
        hops = sizes.cp - 1
        forward = sum((time.forward for time in core), np.zeros_like(hop)) / sizes.cp
        backward = sum((time.backward for time in core), np.zeros_like(hop)) / sizes.cp
        waits, hidden = overlap(hop, forward, self.hardware)
        waits_back, hidden_back = overlap(2 * hop, backward, self.hardware)
        return hops * waits, hops * waits_back, hops * (hidden + hidden_back)


def _launched(device: Times, number: Times, waits: tuple[Array, Array], hardware: Hardware) -> Times:
    """Return the times of a layer whose host needs time for each of a `number` of launches.

    Args:
        device: seconds of the device.
        number: launches.
        waits: exposed communication, forward and backward, during which the host launches too.
        hardware: for the time of a launch.
    """
    each = launch_s(hardware)
    forward = np.maximum(device.forward, each * number.forward - waits[0])
    lacking = np.maximum(0.0, each * number.backward - waits[1] - device.backward)
    share = lacking / np.maximum(number.backward, 1.0)
    again = np.maximum(0.0, each * (number.backward + number.selective) - waits[1] - device.backward - device.selective)
    return Times(
        forward,
        device.backward_input + share * number.backward_input,
        device.backward_weight + share * number.backward_weight,
        device.selective + again - lacking,
    )


def _looked_up(model: Model, sizes: BlockSizes) -> Array:
    """Return the parameters of an embedding that is not tied; a tied one is counted in the head."""
    return np.zeros_like(sizes.tokens) if model.tied else model.vocab * model.hidden / sizes.tp


def _weights(operator: Operator) -> Array:
    """Return the parameters of a matrix product."""
    if isinstance(operator, Product) and operator.weighted:
        return np.asarray(operator.n * operator.k * operator.batch)
    return np.zeros(1)


def _joined(one: object, other: object) -> object:
    if isinstance(one, ArrayRecord) and isinstance(other, ArrayRecord):
        return one.joined(other)
    return np.concatenate((np.asarray(one), np.asarray(other)))


def _taken(value: object, index: NDArray[np.int64]) -> object:
    return value.take_rows(index) if isinstance(value, ArrayRecord) else np.asarray(value)[index]
