"""Time of a collective over a group of ranks that are `stride` apart, inside a node or across nodes.

    ring of n ranks, g of them in each node:   one pass around the ring moves (n − 1)/n of the bytes over every link

The members of a group in one node use their network ports in parallel, so a ring across nodes runs at
min(link, g · network).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.descriptions.hardware import Curve, Hardware
from quintsched.strategies.prediction.operator_device_times import curve_rate
from quintsched.strategies.prediction.operators import Array

GroupSizes: TypeAlias = Array | NDArray[np.int64]
"""Sizes of groups and strides, as integer columns or arrays."""
LINK_LATENCY_S = 3e-6
"""Latency of one hop inside a node: NCCL's own figures for the simple protocol over NVLink, rounded."""
EXCHANGE = 0.92
"""Fraction of the network that an exchange of tokens reaches: 46 of 50 GB/s over 64 H800 with the sizes of DeepSeek-V3
(deepseek-ai/DeepEP, README, normal kernels). NCCL's all-to-all is bound by the port of each GPU too, which reaches 48
to 49 GB/s (NVIDIA/nccl-tests, issues 130 and 267)."""
EXCHANGE_NODES = 20
"""Most nodes that these kernels serve (deepseek-ai/DeepEP, `NUM_MAX_RDMA_PEERS` of csrc/kernels/configs.cuh)."""
NETWORK_LATENCY_S = 8e-6
"""Latency of one hop between nodes."""


def ring_s(moved: Array, ranks: GroupSizes, stride: GroupSizes, hardware: Hardware) -> Array:
    """Return the seconds of one pass around a ring: an all-gather or reduce-scatter of `moved` bytes in total."""
    members = _in_node(ranks, stride, hardware)
    link = _link(moved / np.maximum(ranks, 1), hardware)
    network = members * hardware.network_gbps * 1e9 * hardware.constants.network
    rate = np.where(ranks > members, np.minimum(link, network), link)
    hops = np.maximum(ranks - 1, 0)
    latency = np.where(ranks > members, NETWORK_LATENCY_S, LINK_LATENCY_S)
    # NCCL uses a tree where a ring of many hops would be slower.
    hops = np.minimum(hops, members - 1 + 2 * np.log2(np.maximum(ranks / members, 1)))
    found = np.where(ranks > 1, hops * latency + (ranks - 1) / np.maximum(ranks, 1) * moved / rate, 0.0)
    if hardware.measured.all_reduce:
        half = _between_s(moved, ranks, hardware.measured.all_reduce) / 2
        if apart := hardware.measured.all_reduce_apart:
            half = np.where(stride > 1, _between_s(moved, ranks, apart) / 2, half)
        return np.where(ranks <= members, half, found)
    return found


def all_reduce_s(moved: Array, ranks: GroupSizes, stride: GroupSizes, hardware: Hardware) -> Array:
    """Return the seconds of an all-reduce of `moved` bytes: two passes around the ring."""
    return 2 * ring_s(moved, ranks, stride, hardware)


def exchange_s(
    moved: Array, rows: float, nodes: int | None, ranks: GroupSizes, stride: GroupSizes, hardware: Hardware
) -> Array:
    """Return the seconds of sending each token to its experts, or of their results back: an all-to-all of all rows.

    Traffic to other nodes goes through the rank's own network port, and no rank waits for a ring. With routing limited
    to a number of nodes, kernels for it send a token once to each of these, where it goes on over the links inside;
    but not over more nodes than these kernels serve.

    Args:
        moved: bytes of a rank's tokens.
        rows: experts of a token.
        nodes: most nodes that these are on; None: not limited.
        ranks: members of the group.
        stride: distance between them, in ranks.
        hardware: for the rates.
    """
    members, routed = _in_node(ranks, stride, hardware), moved * rows
    inside = _all_to_all_inside_s(routed * members / np.maximum(ranks, 1), members, hardware)
    across = routed * (ranks - members) / np.maximum(ranks, 1)
    groups = np.maximum(ranks / members, 1.0)
    if nodes is not None:
        once, away = groups <= EXCHANGE_NODES, np.minimum(nodes, groups) * (1 - 1 / groups)
        inside = np.where(once, _all_to_all_inside_s(routed, members, hardware), inside)
        across = np.where(once, moved * away, across)
    latency = np.where(ranks > members, NETWORK_LATENCY_S, LINK_LATENCY_S)
    waits = np.maximum(inside, across / (hardware.network_gbps * 1e9 * EXCHANGE))
    return np.where(ranks > 1, latency + waits, 0.0)


def _all_to_all_inside_s(moved: Array, ranks: GroupSizes, hardware: Hardware) -> Array:
    """Return the seconds of an all-to-all within a node, without its latency."""
    if hardware.measured.all_to_all:
        return _between_s(moved * (ranks - 1) / ranks, ranks, hardware.measured.all_to_all)
    return np.asarray(moved * (ranks - 1) / ranks / _link(moved, hardware))


def message_s(moved: Array, stride: GroupSizes, hardware: Hardware) -> Array:
    """Return the seconds of one message to the rank `stride` away; over the network unless a node holds both."""
    near = 2 * stride <= hardware.gpus_per_node
    if hardware.measured.link is not None:
        across = NETWORK_LATENCY_S + moved / (hardware.network_gbps * 1e9 * hardware.constants.network)
        return np.where(near, _curve_s(hardware.measured.link, moved), across)
    rate = np.where(near, _link(moved, hardware), hardware.network_gbps * 1e9 * hardware.constants.network)
    return np.where(near, LINK_LATENCY_S, NETWORK_LATENCY_S) + moved / rate


def overlap(seconds: Array, beside: Array, hardware: Hardware) -> tuple[Array, Array]:
    """Return the exposed and the hidden time of communication that overlaps with `beside` seconds of computation.

    Collectives slow down the computation beside them, as they take some of the GPU's processors and memory bandwidth.
    """
    covered = np.minimum(seconds, beside)
    exposed = seconds - covered * (1 - hardware.constants.contention)
    return exposed, seconds - exposed


def _between_s(moved: Array, ranks: GroupSizes, curves: Mapping[int, Curve]) -> Array:
    """Return the seconds of a collective, interpolated linearly between the measured numbers of ranks."""
    moved, ranks = np.broadcast_arrays(moved, ranks)
    numbers = [1, *sorted(curves)]
    taken = [np.zeros_like(moved), *(_curve_s(curves[number], moved) for number in numbers[1:])]
    found = np.where(ranks >= numbers[-1], taken[-1], 0.0)
    for (low, of_low), (high, of_high) in pairwise(zip(numbers, taken, strict=True)):
        share = (ranks - low) / (high - low)
        found = np.where((ranks >= low) & (ranks < high), of_low + share * (of_high - of_low), found)
    return found


def _curve_s(curve: Curve, moved: Array) -> Array:
    """Return the seconds of a message or an all-reduce; below the smallest measured size the time is constant."""
    size = np.maximum(moved, curve.sizes[0])
    return size / curve_rate(curve, size)


def _in_node(ranks: GroupSizes, stride: GroupSizes, hardware: Hardware) -> NDArray[np.int64]:
    """Return the number of members of a group that share a node."""
    return np.clip(hardware.gpus_per_node // stride, 1, ranks)


def _link(moved: Array, hardware: Hardware) -> Array | float:
    if hardware.measured.link is not None:
        return curve_rate(hardware.measured.link, moved)
    return hardware.link_gbps * 1e9 * hardware.constants.link
