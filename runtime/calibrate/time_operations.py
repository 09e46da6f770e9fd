"""Computations of a rank, timed: matrix products, attention, elementwise operations, an optimizer step.

    ops/s                 ╭────── products that fill the device
        │            ╭────╯
        │       ╭────╯
        │ ──────╯  here launch overhead dominates: kernel_s
        └──────────────────────▶ operations of one product

Every size is one point of a curve. Sizes beyond one that took long are left out. Tensors take turns, so that
none of them is in a cache when it is used again, as in a training step, which touches much other memory in between.

A call's time is the median of many, on the clock that fits the device.

cpu            CPU time of this thread: other load on the machine does not count
accelerator    seconds until the device is done, many calls at a time: the host runs ahead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.strategies.descriptions.hardware import Curve

from ..comm.clocks import now_s, settled_s, thread_computed_s
from ..comm.device import is_accelerator

SHORTEST_S = {False: 50e-6, True: 2e-3}
"""Shortest duration of a sample, reached by repeated calls: on an accelerator it includes the final synchronization."""
FEWEST_SAMPLES = 3


def call_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median seconds of a call, repeated until the budget is used up, and at least a few times."""
    read = partial(settled_s, device) if is_accelerator(device) else thread_computed_s
    call()
    number = _calls_per_sample(call, read, SHORTEST_S[is_accelerator(device)])
    samples: list[float] = []
    end = now_s() + budget_s
    while len(samples) < FEWEST_SAMPLES or now_s() < end:
        samples.append(_sample_s(call, read, number))
    return median(samples)


def curve_of(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Return the rates of calls of these sizes and durations."""
    return Curve(sizes=tuple(sizes), rates=tuple(size / took for size, took in zip(sizes, seconds, strict=True)))


def _calls_per_sample(call: Callable[[], object], read: Callable[[], float], shortest_s: float) -> int:
    number = 1
    while _sample_s(call, read, number) * number < shortest_s:
        number *= 2
    return number


def _sample_s(call: Callable[[], object], read: Callable[[], float], number: int) -> float:
    begin = read()
    for _ in range(number):
        call()
    return (read() - begin) / number


TIMED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
)
"""Dtypes of matrix products, by their names in a description."""
EDGES = {False: (32, 64, 128, 256, 512, 1024), True: (256, 512, 1024, 2048, 4096, 8192)}
"""Rows and columns of square matrices, by whether the device is an accelerator."""
LENGTHS = {False: (64, 128, 256, 512), True: (512, 1024, 2048, 4096)}
HEADS, HEAD_SIZE = 8, 64
ELEMENTS = {False: (2**12, 2**15, 2**18, 2**21, 2**23), True: (2**18, 2**21, 2**24, 2**27)}
NORM_WIDTH = 256
"""Width of the rows that are normalised."""
PASSES, PASSING = 16, 6
"""Passes (reads or writes) over all numbers by `_elementwise`, backward included, and its number of operations."""
STEPPED = {False: (2**14, 2**18, 2**22, 2**24), True: (2**20, 2**24, 2**27)}
TENSORS = 8
"""Number of parameters that share the numbers of an optimizer step."""
PRODUCTS = 3
"""Matrix products of a layer, backward included."""
TINY = 8
TINY_OPERATIONS = 12
"""Operations of `_tiny_block`, backward included."""
LONG_S = 0.1
"""Duration beyond which larger sizes are not measured."""
BUDGET_S = 0.1
"""Duration of the measurement of each point."""
CACHED_BYTES, MOST_TURNS = 2**27, 64
"""Total bytes of tensors that take turns, and limit of their number."""


def matmul_curves(device: torch.device) -> dict[str, Curve]:
    """Return the rates of square layers, operations per second by operations, for every dtype."""
    edges = EDGES[is_accelerator(device)]
    return {
        name: _curve(edges, lambda edge: 2.0 * edge**3, partial(_layer, dtype, device), device, repeats=PRODUCTS)
        for name, dtype in TIMED_DTYPES.items()
    }


def attention_curves(device: torch.device) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Return the rates of a causal attention's forward and of its backward, by the operations of the forward."""
    both: tuple[dict[str, Curve], dict[str, Curve]] = ({}, {})
    for name, dtype in TIMED_DTYPES.items():
        for found, make in zip(both, (_attention, _attention_backward), strict=True):
            found[name] = _curve(
                LENGTHS[is_accelerator(device)],
                lambda length: 2.0 * HEADS * HEAD_SIZE * length**2,
                partial(make, dtype, device),
                device,
            )
    return both


def memory_curve(device: torch.device) -> Curve:
    """Return bytes per second of elementwise operations in float32, by the bytes of one of them."""
    return _curve(
        ELEMENTS[is_accelerator(device)],
        lambda size: 4.0 * PASSES * size / PASSING,
        lambda size: _elementwise(size, device),
        device,
        repeats=PASSING,
    )


def optimizer_curve(device: torch.device) -> Curve:
    """Return numbers per second of a step of AdamW, by their count."""
    return _curve(STEPPED[is_accelerator(device)], float, lambda size: _optimizer_step(size, device), device)


def kernel_s(device: torch.device) -> float:
    """Return the seconds of an operation on tiny tensors, that is its launch overhead, autograd's part included."""
    return call_s(_tiny_block(device), device, BUDGET_S) / TINY_OPERATIONS


def _curve(
    sizes: Sequence[int],
    work: Callable[[int], float],
    call_of: Callable[[int], Callable[[], object]],
    device: torch.device,
    repeats: int = 1,
) -> Curve:
    """Return a curve over the sizes, until calls take too long; a call does an operation `repeats` times."""
    seconds: list[float] = []
    for size in sizes:
        seconds.append(call_s(call_of(size), device, BUDGET_S) / repeats)
        if seconds[-1] * repeats > LONG_S:
            break
    return curve_of([work(size) for size in sizes[: len(seconds)]], seconds)


def _in_turn(make: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yield tensors in turn, so many that none is still in a cache."""
    first = make()
    turns = min(MOST_TURNS, max(1, CACHED_BYTES // first.nbytes))
    others = (first.detach().clone().requires_grad_(first.requires_grad) for _ in range(turns - 1))
    return cycle([first, *others])


def _layer(dtype: torch.dtype, device: torch.device, edge: int) -> Callable[[], object]:
    """Return a call of forward and backward of a square layer with a bias: three matrix products."""

    def make() -> Tensor:
        return torch.randn(edge, edge, device=device).to(dtype).requires_grad_()

    inputs, weights, gradients = _in_turn(make), _in_turn(make), _in_turn(make)
    bias = torch.zeros(edge, device=device, dtype=dtype, requires_grad=True)

    def run() -> None:
        given, weight = next(inputs), next(weights)
        torch.autograd.grad(F.linear(given, weight, bias), (given, weight, bias), next(gradients))

    return run


def _attention(dtype: torch.dtype, device: torch.device, length: int) -> Callable[[], object]:
    heads = _in_turn(lambda: _heads(dtype, device, length))
    return lambda: _attend(next(heads))


def _attention_backward(dtype: torch.dtype, device: torch.device, length: int) -> Callable[[], object]:
    """Return a call of the backward of forwards that were run before."""

    def make() -> tuple[Tensor, Tensor]:
        heads = _heads(dtype, device, length).requires_grad_()
        return heads, _attend(heads)

    turns = cycle([make() for _ in range(4)])
    gradient = torch.ones(1, HEADS, length, HEAD_SIZE, device=device, dtype=dtype)

    def run() -> None:
        heads, mixed = next(turns)
        torch.autograd.grad(mixed, heads, gradient, retain_graph=True)

    return run


def _attend(heads: Tensor) -> Tensor:
    query, key, value = heads
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _heads(dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
    """Return queries, keys and values."""
    return torch.randn(3, 1, HEADS, length, HEAD_SIZE, device=device).to(dtype)


def _elementwise(size: int, device: torch.device) -> Callable[[], object]:
    """Return a call of forward and backward of a norm, a GELU and an addition: 2 + 3, 2 + 3 and 3 + 3 passes."""
    inputs = _in_turn(lambda: torch.randn(size // NORM_WIDTH, NORM_WIDTH, device=device, requires_grad=True))
    gradient = torch.randn(size // NORM_WIDTH, NORM_WIDTH, device=device)

    def run() -> None:
        given = next(inputs)
        torch.autograd.grad(F.gelu(F.layer_norm(given, (NORM_WIDTH,))) + given, given, gradient)

    return run


def _optimizer_step(size: int, device: torch.device) -> Callable[[], object]:
    parameters = [nn.Parameter(torch.randn(size // TENSORS, device=device)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=True)
    return optimizer.step


def _tiny_block(device: torch.device) -> Callable[[], object]:
    """Return a call of forward (norm, product, GELU, product, addition) and backward of an MLP, on tiny tensors."""
    block = nn.Sequential(nn.LayerNorm(TINY), nn.Linear(TINY, TINY), nn.GELU(), nn.Linear(TINY, TINY)).to(device)
    given: Tensor = torch.randn(TINY, TINY, device=device, requires_grad=True)
    return lambda: (given + block(given)).sum().backward()
