"""Reader of SimuMax's system files (`configs/system/*.json`): a GPU's measured products, attention, passes and links.

    {"sys_name": "b200_bf16", "accelerator": {"op": {"matmul": {"tflops": 2250, "accurate_efficient_factor":
        {"b=1, m=4096, k=8192, n=10240, …": 0.645, …}}, …}, "bandwidth": …}, "networks": …}
                                     │
                                     ▼
    {"name": "b200_bf16", "tflops": {"bf16": 2250}, "measured": {"products": [[1, 4096, 10240, 8192, 1.45e15], …], …}}

Fractions of the peak count attention without its causal mask, so that they are halved here. A rate is given by its
share of the peak, and a time for each use beside it: of a collective, `latency_us` for each hop of a ring, and a fixed
part. Rates are in GiB/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

SIZE_KEYS = tuple(float(2**power) for power in range(10, 35, 2))
"""Bytes at which curves of passes and links are sampled."""
GIB = float(2**30)
GROUPS = (2, 4, 8)
"""Numbers of ranks of collectives."""
HALVES = ("reduce_scatter", "all_gather")
BACKWARD = 2.5
"""FLOP of fused attention's backward per FLOP of the forward, as SimuMax counts."""


def read_system(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Hardware`; raises KeyError for a part that is missing."""
    accelerator, networks = values["accelerator"], values["networks"]
    operators, passes = accelerator["op"], accelerator["bandwidth"]["default"]
    inside = {ranks: _inside(networks, ranks) for ranks in GROUPS}
    link, outside = inside[max(GROUPS)]["bandwidth"], networks["inter_node"]["bandwidth"]
    peak = operators["matmul"]["tflops"] * 1e12
    measured = {
        "products": [*_products(operators["matmul"]), *_grouped(operators.get("group_matmul", {}))],
        "attention": {"bf16": _attention(operators["sdp_fwd"], 1.0)},
        "attention_backward": {"bf16": _attention(operators["sdp_bwd"], BACKWARD)},
        "memory": _curve(passes["gbps"] * GIB * passes["efficient_factor"], passes["latency_us"] * 1e-6),
        "passes": _passes(accelerator["bandwidth"]),
        "link": _curve(link["gbps"] * GIB * link["efficient_factor"], link["latency_us"] * 1e-6),
        "all_reduce": {ranks: _all_reduce(network, ranks) for ranks, network in inside.items()},
        "all_to_all": {ranks: _curve(*_rate_of(network, "all2all", ranks)) for ranks, network in inside.items()},
        "all_reduce_apart": dict(_apart(inside[max(GROUPS)])),
    }
    return {
        "name": values["sys_name"],
        "tflops": {"bf16": peak / 1e12},
        "memory_gb": accelerator["mem_gbs"],
        "memory_gbps": passes["gbps"] * GIB / 1e9,
        "gpus_per_node": values["num_per_node"],
        "link_gbps": link["gbps"] * GIB / 1e9,
        "network_gbps": outside["gbps"] * GIB / 1e9,
        "measured": measured,
        "sources": {"measured": "a system file of SimuMax"},
    }


def _passes(bandwidth: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of passes that were measured by themselves, relative to the usual one."""
    shares = {
        name: one["efficient_factor"] / bandwidth["default"]["efficient_factor"] for name, one in bandwidth.items()
    }
    found = {name: shares[key] for name, key in (("cross-entropy", "ce_fusion"),) if key in shares}
    if {"permute_fwd", "permute_bwd"} <= shares.keys():
        both = 2 / (1 / shares["permute_fwd"] + 1 / shares["permute_bwd"])
        found |= {"permute": both, "unpermute": both}
    return found


def _inside(networks: Mapping[str, Any], ranks: int) -> Mapping[str, Any]:
    """Return the links inside a node; where PCIe is shared, as groups of so many neighbours use it."""
    name = f"intra_node_pcie_{ranks}x" if networks.get("intra_with_pcie") else "high_intra_node"
    found: Mapping[str, Any] = networks[name]
    return found


def _measured(operator: Mapping[str, Any]) -> Iterator[tuple[dict[str, int], str, float]]:
    """Yield the sizes of each measured case, its key, and its FLOP/s."""
    for key, share in (operator.get("accurate_efficient_factor") or {}).items():
        sizes = {name.lower(): int(size) for name, size in re.findall(r"(\w+)=(\d+)", key)}
        yield sizes, key, share * operator["tflops"] * 1e12


def _products(operator: Mapping[str, Any]) -> Iterator[list[float]]:
    for sizes, _, rate in _measured(operator):
        yield [sizes["b"], sizes["m"], sizes["n"], sizes["k"], rate]


def _grouped(operator: Mapping[str, Any]) -> Iterator[list[float]]:
    """Yield the products of experts; a key names the forward's sizes."""
    for sizes, key, rate in _measured(operator):
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        made = (k, n, m) if "bwd_grad_w" in key else (m, k, n) if "bwd_grad_act" in key else (m, n, k)
        yield [sizes["ng"], *made, rate]


def _attention(operator: Mapping[str, Any], passes: float) -> dict[str, list[float]]:
    """Return the forward's FLOP, without masked ones, per second, by their number."""
    found: dict[float, list[float]] = {}
    for sizes, _, rate in _measured(operator):
        width = sizes["qk_head_dim"] + sizes["v_head_dim"]
        flops = float(sizes["batch"] * sizes["head_num"] * sizes["seq_len"] ** 2 * width)
        found.setdefault(flops, []).append(rate / 2 / passes)
    sizes_of = sorted(found)
    return {"sizes": sizes_of, "rates": [sum(found[size]) / len(found[size]) for size in sizes_of]}


def _rate_of(network: Mapping[str, Any], kind: str, ranks: int) -> tuple[float, float]:
    """Return bytes per second and the seconds of each use of one kind of communication among so many ranks."""
    usual, own = network["bandwidth"], network["op"][kind]
    share = own.get("efficient_factor", usual["efficient_factor"])
    fixed_us = own.get("fixed_latency_us_by_comm_num", {}).get(str(ranks), own.get("fixed_latency_us", 0.0))
    latency_us = own.get("latency_us", usual["latency_us"]) * (ranks - 1) + fixed_us
    return usual["gbps"] * GIB * share, latency_us * 1e-6


def _all_reduce(network: Mapping[str, Any], ranks: int) -> dict[str, list[float]]:
    """Return an all-reduce as it runs with sequence parallelism and ZeRO: a reduce-scatter and an all-gather."""
    each = [_rate_of(network, kind, ranks) for kind in HALVES]
    passes = sum(1 / rate for rate, _ in each) * (ranks - 1) / ranks
    return _curve(1 / passes, sum(latency_s for _, latency_s in each))


def _apart(network: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Yield an all-reduce for each number of replicas, beside tp, over which it was measured."""
    halves = [network["op"][kind].get("dp_fixed_bw", {}) for kind in HALVES]
    for ranks in sorted(halves[0].keys() & halves[1].keys(), key=int):
        passes = sum(1 / (half[ranks] * GIB) for half in halves) * (int(ranks) - 1) / int(ranks)
        yield int(ranks), _curve(1 / passes, 0.0)


def _curve(rate: float, latency_s: float) -> dict[str, list[float]]:
    return {"sizes": list(SIZE_KEYS), "rates": [size / (size / rate + latency_s) for size in SIZE_KEYS]}
