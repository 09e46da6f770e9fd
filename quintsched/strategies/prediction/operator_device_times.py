"""Time of one operator on one GPU; all efficiency factors are in this module.

    product:    max(flops / (peak · e(m, n, k)), bytes / (memory · e'))
                e = E · fraction of processors that full waves of tiles keep busy · k / (k + H)
    attention:  flops / (peak · published fraction for the kernel)
    pass:       bytes / (memory · e')

These are times of the device. The host launches operators ahead of it, so launches cost time only where a whole layer
has too little work to cover them: see `launches`, and `block_times`.

`Hardware.constants` are fitted by `benchmarks/fit_cost_model.py` to one published table and then frozen. Curves in
`Hardware.measured` take precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quintsched.strategies.descriptions.hardware import Curve, Hardware
from quintsched.strategies.descriptions.strategy import SHORT
from quintsched.strategies.prediction.operators import Array, AttentionKernel, Operator, Product

FUSED = {"flash": (0.40, 0.30), "flash2": (0.62, 0.52)}
"""Fractions of the peak of fused attention, forward and backward, on an A100, causal masks counted as half: the centres
of the ranges in FlashAttention-2 (arXiv:2307.08691, section 1 and Figures 4 to 6) for the first version (30 to 50 % and
25 to 35 %) and for itself (50 to 73 % and 40 to 63 %). Heads of 64 and more differ little in speed."""
FUSED_HALF = 256.0
"""Number of keys per query at which fused attention runs at half its rate: for FlashAttention-2's backward without
mask, gpu-mode/ring-attention, issue 10, gives 67, 79, 89, 95 and 98 % of the best at 512, 1024, 2048, 4096 and 8192
keys."""
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.8))
"""Tiles that one processor computes at a time, with their fraction of the largest ones' rate: the smaller a tile, the
more often each operand is read."""
LAUNCH_S = 79e-6
"""Seconds of the host for each operator that it launches, with autograd's part and the accumulation of gradients. An
eager loop over a GPT of 24 layers in bf16 took 183 ms for 4 microbatches on the host of an H200 (docs/gpu.md): 1.9 ms
for each layer and microbatch, which is 24 operators."""
CASTS = {"fp8": (3.0, 3.0), "mxfp8": (2 + 2 * SHORT["mxfp8"], 0.0)}
"""Bytes read and written per number that is rounded from 16 to 8 bits, and per input that is rounded again for the
weights' gradient, in tiles that lie across; "mxfp8" makes both forms at once, as blocks cannot be transposed
(Transformer Engine, `MXFP8Quantizer`)."""
IN_16_BITS = ("logits", "router", "patches")
"""Products with weights that stay in 16 bits where a layer's are in 8 (arXiv:2412.19437, section 3.3.1)."""
BACKWARD_FLOPS = 2.5
"""FLOP of fused attention's backward per FLOP of the forward: five products to two."""

RING_PASSES, RING_KERNELS = (5, 15), (10, 20)
"""Extra cost of a ring step of attention over the cp axis, forward and backward, beside its fused call: passes over as
many float32 numbers as its queries have, and kernels."""


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds (or launches) of one operator, or of a sum of several: forward, both halves of the backward, and the part
    that selective recomputation runs again."""

    forward: Array
    backward_input: Array
    backward_weight: Array
    selective: Array

    def __add__(self, other: Times) -> Times:
        return Times(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
            self.selective + other.selective,
        )

    @property
    def backward(self) -> Array:
        """Full backward: the sum of both halves."""
        return self.backward_input + self.backward_weight


def operator_times(
    operator: Operator,
    hardware: Hardware,
    dtype: str,
    accumulated: Array | float = 0.0,
) -> Times:
    """Return the times of an operator; curves of `hardware.measured` take precedence over the fitted model.

    `accumulated`: as in `operators.BlockSizes`.
    """
    if isinstance(operator, Product):
        casts = CASTS[dtype] if dtype in SHORT and _is_short(operator) else None
        dtype = "bf16" if dtype in SHORT and casts is None else dtype
        m, n, k = operator.m, operator.n, operator.k
        forward, inputs, weights = (
            product_s(operator, *shape, hardware, dtype, made)
            for shape, made in (((m, n, k), 0.0), ((m, k, n), 0.0), ((k, n, m), accumulated * operator.weighted))
        )
        if casts is not None:
            of_input, again, of_result = (
                memory_s(bytes_ * operator.batch * m * each, hardware)
                for bytes_, each in ((casts[0], k), (casts[1], k), (casts[0], n))
            )
            forward, inputs, weights = forward + of_input, inputs + of_result, weights + again
        zero = np.zeros_like(forward)
        halves = (inputs, weights) if operator.weighted else (inputs + weights, zero)
        return Times(forward, *halves, forward if operator.module == "core_attn" else zero)
    if isinstance(operator, AttentionKernel):
        return _attention_times(operator, hardware, dtype)
    share = hardware.measured.passes.get(operator.name, 1.0)
    forward, backward = (memory_s(moved / share, hardware) for moved in (operator.forward, operator.backward))
    zero = np.zeros_like(forward)
    return Times(forward, backward, zero, forward if operator.module == "core_attn" else zero)


def _is_short(product: Product) -> bool:
    """Return whether a product runs in 8 bits: those with weights, but for the head and the router."""
    return product.weighted and product.name not in IN_16_BITS


def launches(operator: Operator) -> Times:
    """Return the number of launches of an operator: one forward, and backward two for a product, else one.

    These are the operations that `calibrate` divides the time of a small block by. What an operator without a forward
    of its own adds, such as the gradient of a bias, belongs to the product before it.
    """
    if isinstance(operator, Product):
        one = np.ones_like(operator.m)
        halves = (one, one) if operator.weighted else (2 * one, 0 * one)
        return Times(one, *halves, one * (operator.module == "core_attn"))
    if isinstance(operator, AttentionKernel):
        calls = np.maximum(operator.ring, 1.0)
        return Times(calls, calls, 0 * calls, calls)
    one = np.where(operator.forward > 0, 1.0, 0.0)
    return Times(one, one, 0 * one, one * (operator.module == "core_attn"))


def launch_s(hardware: Hardware) -> float:
    """Return the seconds of the host for each launch; 0 on a CPU, which runs what it launches.

    A `measured.kernel_s` of 0 is for steps that are captured as graphs or compiled.
    """
    if hardware.runs_at_once:
        return 0.0
    return LAUNCH_S if hardware.measured.kernel_s is None else hardware.measured.kernel_s


def product_s(
    product: Product,
    m: Array,
    n: Array,
    k: Array,
    hardware: Hardware,
    dtype: str,
    made: Array | float = 0.0,
) -> Array:
    """Return the seconds of one matrix product, m × k by k × n, of an operator's forward or backward.

    `made`: bytes moved for each element of the result; 0: those of the operator's precision.
    """
    flops = 2.0 * product.batch * m * n * k
    measured = hardware.measured
    if dtype in measured.matmul:
        return np.maximum(kernel_s(hardware), flops / curve_rate(measured.matmul[dtype], flops))
    if measured.products and dtype not in SHORT:
        return np.maximum(kernel_s(hardware), flops / shape_rate(measured.products, product.batch, m, n, k))
    half = hardware.constants.half * (peak(hardware, dtype) / peak(hardware, "bf16") if dtype in SHORT else 1.0)
    shape = full_waves(m, n, product.batch, hardware.processors) * k / (k + half)
    rate = peak(hardware, dtype) * hardware.efficiency * hardware.constants.product * shape
    result = np.where(np.asarray(made) > 0, made, product.width)
    moved = product.batch * ((m * k + k * n) * product.width + m * n * result)
    return np.maximum(kernel_s(hardware), np.maximum(flops / rate, moved / memory_rate(moved, hardware)))


def shape_rate(measured: Sequence[Sequence[float]], batch: Array | float, m: Array, n: Array, k: Array) -> Array:
    """Return the FLOP/s of the measured product with the nearest sizes by their logarithms; m and n are alike."""
    table = np.log(np.array(measured, np.float64))
    asked = np.log(np.maximum(np.stack(np.broadcast_arrays(batch, m, n, k), axis=-1), 1.0))
    turned = asked[..., [0, 2, 1, 3]]
    apart = [np.abs(each[..., None, :] - table[:, :4]).sum(axis=-1) for each in (asked, turned)]
    found: Array = np.exp(table[np.minimum(*apart).argmin(axis=-1), 4])
    return found


def full_waves(m: Array, n: Array, batch: Array | float, processors: int) -> Array:
    """Return the fraction of a GPU's processors that a product of m × n results keeps busy, with the best tile size.

    Each processor computes one tile at a time, and the last wave of tiles may leave most of them idle.
    """
    return np.asarray(np.maximum.reduce([_busy(m, n, batch, processors, *tile) for tile in TILES]))


def _busy(m: Array, n: Array, batch: Array | float, processors: int, height: int, width: int, share: float) -> Array:
    tiles = np.ceil(m / height) * np.ceil(n / width) * batch
    made = np.ceil(tiles / processors) * processors * height * width
    found: Array = share * m * n * batch / made
    return found


def memory_s(moved: Array, hardware: Hardware) -> Array:
    """Return the seconds of a memory pass that reads and writes `moved` bytes in all."""
    seconds = np.maximum(kernel_s(hardware), moved / memory_rate(moved, hardware))
    return np.where(moved > 0, seconds, 0.0)


def memory_rate(moved: Array, hardware: Hardware) -> Array | float:
    """Return the bytes per second of a memory pass of this size."""
    if hardware.measured.memory is not None:
        return curve_rate(hardware.measured.memory, moved)
    return hardware.memory_gbps * 1e9 * hardware.constants.memory


def kernel_s(hardware: Hardware) -> float:
    """Return the least seconds of an operator: on a CPU, those of its call; on a GPU 0, as calls run ahead."""
    return hardware.measured.kernel_s or 0.0 if hardware.runs_at_once else 0.0


def peak(hardware: Hardware, dtype: str) -> float:
    """Return the datasheet's FLOP/s of matrix products; fp16 and bf16 replace each other if one is missing."""
    known = hardware.tflops
    for name in {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16"), "fp32": ("fp32",)}.get(dtype, (dtype,)):
        if name in known:
            return known[name] * 1e12
    return min(known.values()) * 1e12


def curve_rate(curve: Curve, size: Array) -> Array:
    """Return the rate at a size: linear in the logarithm of the size, constant beyond both ends."""
    found: Array = np.interp(np.log(np.maximum(size, 1e-9)), np.log(np.array(curve.sizes)), np.array(curve.rates))
    return found


def _attention_times(attention: AttentionKernel, hardware: Hardware, dtype: str) -> Times:
    measured, dtype = hardware.measured, "bf16" if dtype in SHORT else dtype
    if dtype in measured.attention and dtype in measured.attention_backward:
        curves = measured.attention[dtype], measured.attention_backward[dtype]
        forward, backward = (
            np.maximum(kernel_s(hardware), attention.flops / curve_rate(curve, attention.flops)) for curve in curves
        )
        if hardware.runs_at_once:
            around = _ring_s(attention, hardware, curves)
            forward, backward = (
                np.where(attention.ring > 1, passing, fused)
                for passing, fused in zip(around, (forward, backward), strict=True)
            )
        zero = np.zeros_like(forward)
        return Times(forward, backward, zero, forward)
    forward_share, backward_share = FUSED[attention.kernel]
    most = peak(hardware, dtype) * hardware.attention * min(1.0, attention.head / 64)
    rate = most * attention.length / (attention.length + FUSED_HALF)
    forward = np.maximum(kernel_s(hardware), attention.flops / (rate * forward_share))
    backward = np.maximum(kernel_s(hardware), BACKWARD_FLOPS * attention.flops / (rate * backward_share))
    zero = np.zeros_like(forward)
    return Times(forward, backward, zero, forward)


def _ring_s(attention: AttentionKernel, hardware: Hardware, curves: tuple[Curve, Curve]) -> tuple[Array, Array]:
    """Return the seconds of ring attention over the cp axis: forward and backward.

    A step of the ring is a fused causal call for a rank's queries and another rank's keys, with half of the queries or
    half of the keys, so that all steps have the same FLOP; and adding its result to the accumulated one.
    """
    of_step = attention.flops / attention.ring
    moved = 4.0 * attention.batch * attention.rows * attention.head
    passing_s = moved / memory_rate(moved, hardware)
    forward, backward = (
        attention.ring
        * (
            np.maximum(kernel_s(hardware), of_step / curve_rate(curve, of_step))
            + passes * passing_s
            + kernels * kernel_s(hardware)
        )
        for curve, passes, kernels in zip(curves, RING_PASSES, RING_KERNELS, strict=True)
    )
    return forward, backward
