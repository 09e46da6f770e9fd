"""Translation of other tools' names for figures of models and hardware, where the value changes too.

    {"swiglu": true, "untie_embeddings_and_output_weights": true}   ──▶  {"activation": "swiglu", "tied": false}
    {"nvlink_gbps": 600, "ib_gbps": 200, "tflops_bf16": 312, …}     ──▶  {"link_gbps": 300, "network_gbps": 25, …}

Datasheets add up both directions of NVLink and give the network in Gbit/s; `Hardware` has GB/s of one direction. Names
with the same meaning are aliases of the fields themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Meaning = Callable[[Any], dict[str, Any]]


def _named(name: str, by: float = 1.0) -> Meaning:
    """Return a translation that renames a number and scales it; other values are left for validation to refuse."""

    def carry(value: Any) -> dict[str, Any]:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {} if value is None else {name: value * by if is_number and by != 1.0 else value}

    return carry


_MODEL: dict[str, Meaning] = {
    "swiglu": lambda value: {"activation": "swiglu"} if value is True else {},
    "tie_word_embeddings": _named("tied"),
    "untie_embeddings_and_output_weights": lambda value: {"tied": not value if isinstance(value, bool) else value},
    "add_bias_linear": _named("biases"),
    "normalization": lambda value: {"norm": str(value).lower()},
}
_HARDWARE: dict[str, Meaning] = {
    "tflops_bf16": lambda value: {"tflops": {"bf16": value, "fp16": value}},
    "hbm_gb": _named("memory_gb"),
    "hbm_gbps": _named("memory_gbps"),
    "nvlink_gbps": lambda value: _named("link_gbps", 0.5)(value) if value else {},
    "ib_gbps": _named("network_gbps", 1 / 8),
}


def of_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's description by `Model`'s names; keys may have hyphens, like Megatron's options."""
    return _in_our_words({str(name).replace("-", "_"): value for name, value in values.items()}, _MODEL)


def of_hardware(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hardware's description by `Hardware`'s names; a GPU without NVLink communicates over PCIe."""
    found = _in_our_words(values, _HARDWARE)
    if "nvlink_gbps" in values and "link_gbps" not in found:
        found["link_gbps"] = found.get("pcie_gbps", 32.0)
    return found


def _in_our_words(values: Mapping[str, Any], words: Mapping[str, Meaning]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= words[name](value) if name in words else {name: value}
    return found
