"""Attention of queries to one block of keys and values: output (`mean`) and logsumexp of the scores (`weight`).

    forward     weights = exp(query · key / √size)     weight = log Σ weights     mean = Σ weights · values / Σ weights
    backward    gradients of one block from mean and weight over all blocks (FlashAttention-2, section 3.1)

The first kernel that supports the keys computes all blocks of an attention, forward and backward:

    kernel           device   types                         size of a head        torch's operator
    CPU_FLASH        cpu      float16 bfloat16 float32 64   any                   …_flash_attention_for_cpu
    CUDA_FLASH       cuda     float16 bfloat16              a multiple of 8       …_flash_attention
    CUDA_EFFICIENT   cuda     float16 bfloat16 float32      a multiple of 8 (4)   …_efficient_attention
    PLAIN            any      any                           any                   matmuls, some queries at a time

torch's backend selection applies (`torch.nn.attention.sdpa_kernel`); on CUDA, torch reports what the device supports.
No kernel materialises the scores of all queries and keys at once, so memory is linear in the tokens. A kernel takes
tensors (samples, heads, tokens, size) of unit stride in the last dimension, with as many query heads as key heads.

Grouped query heads (GQA) that share a key head are folded, without a copy of keys and values:

    no mask            one call: the query heads of a group are concatenated along the tokens
    on the diagonal    one call for each head of a group: the causal mask depends on a query's position in the tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn import functional as F

MOST_SCORES = 1 << 24
"""Most bytes of scores that `PLAIN_KERNEL` holds at a time (but at least those of one query of each head)."""

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, or their gradients."""

HALVES = (torch.float16, torch.bfloat16)
ALIGNED = 32
"""Memory-efficient attention pads its logsumexp with infinity to a multiple of this."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """Kernel that computes a block, forward and backward."""

    name: str
    takes: Callable[[Tensor], bool]
    """(keys) → whether it supports their device, dtype and head size."""
    forward: Callable[[QueryKeyValue, bool], tuple[Tensor, Tensor]]
    """(block, is on the diagonal) → mean (samples, heads, tokens, size) and weight (samples, heads, tokens), in float32
    at least."""
    backward: Callable[[Tensor, QueryKeyValue, Tensor, Tensor, bool], QueryKeyValue]
    """(gradient of the mean, block, mean and weight over all blocks, is on the diagonal) → the block's gradients."""


def _cpu_flash_takes(key: Tensor) -> bool:
    known = (*HALVES, torch.float32, torch.float64)
    return key.is_cpu and key.dtype in known and torch.backends.cuda.flash_sdp_enabled()


def _cpu_flash(block: QueryKeyValue, is_diagonal: bool) -> tuple[Tensor, Tensor]:
    mean, weight = aten._scaled_dot_product_flash_attention_for_cpu(*block, 0.0, is_diagonal)
    return mean, weight


def _cpu_flash_backward(
    gradient: Tensor, block: QueryKeyValue, mean: Tensor, weight: Tensor, is_diagonal: bool
) -> QueryKeyValue:
    # In half precision the kernel accumulates key gradients in that precision; float32 is as fast.
    given = (tensor.to(weight.dtype) for tensor in (gradient, *block, mean))
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, of_key, of_value = op(*given, weight, 0.0, is_diagonal)
    return of_query, of_key, of_value


def _cuda_flash_takes(key: Tensor) -> bool:
    fits = key.is_cuda and key.dtype in HALVES and key.shape[-1] % 8 == 0
    return fits and torch.backends.cuda.can_use_flash_attention(_asked(key))


def _cuda_flash(block: QueryKeyValue, is_diagonal: bool) -> tuple[Tensor, Tensor]:
    mean, weight, *_ = aten._scaled_dot_product_flash_attention(*block, 0.0, is_diagonal)
    return mean, weight


def _cuda_flash_backward(
    gradient: Tensor, block: QueryKeyValue, mean: Tensor, weight: Tensor, is_diagonal: bool
) -> QueryKeyValue:
    lengths = block[0].shape[-2], block[1].shape[-2]
    drawn = torch.empty(2, dtype=torch.uint64, device=gradient.device)  # dropout's generator state: unused
    of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_backward(
        gradient, *block, mean, weight, None, None, *lengths, 0.0, is_diagonal, drawn, drawn[0]
    )
    return of_query, of_key, of_value


def _cuda_efficient_takes(key: Tensor) -> bool:
    multiple = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}.get(key.dtype)
    fits = key.is_cuda and multiple is not None and key.shape[-1] % multiple == 0
    return fits and torch.backends.cuda.can_use_efficient_attention(_asked(key))


def _cuda_efficient(block: QueryKeyValue, is_diagonal: bool) -> tuple[Tensor, Tensor]:
    mean, padded, *_ = aten._scaled_dot_product_efficient_attention(*block, None, True, 0.0, is_diagonal)
    return mean, padded[..., : mean.shape[-2]]


def _cuda_efficient_backward(
    gradient: Tensor, block: QueryKeyValue, mean: Tensor, weight: Tensor, is_diagonal: bool
) -> QueryKeyValue:
    padded = F.pad(weight, (0, -weight.shape[-1] % ALIGNED), value=torch.inf)
    mean = mean.transpose(1, 2).contiguous().transpose(1, 2)  # in half precision it is read by the forward's strides
    drawn = torch.empty((), dtype=torch.int64, device=gradient.device)  # dropout's generator state: unused
    of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, *block, None, mean, padded, drawn, drawn, 0.0, [True, True, True, False], is_diagonal
    )
    return of_query, of_key, of_value


def _plain(block: QueryKeyValue, is_diagonal: bool) -> tuple[Tensor, Tensor]:
    query, key, value = block
    mean = torch.empty_like(query)
    weight = torch.empty(query.shape[:-1], dtype=wide(query.dtype), device=query.device)
    for rows, keys in _slices(query, key, is_diagonal):
        scores = _scores(query[..., rows, :], key[..., keys, :], is_diagonal)
        weight[..., rows] = fresh = scores.logsumexp(-1)
        shares = scores.sub_(fresh[..., None]).exp_().to(value.dtype)
        mean[..., rows, :] = shares @ value[..., keys, :]
    return mean, weight


def _plain_backward(
    gradient: Tensor, block: QueryKeyValue, mean: Tensor, weight: Tensor, is_diagonal: bool
) -> QueryKeyValue:
    query, key, value = block
    slope = (gradient.to(weight.dtype) * mean.to(weight.dtype)).sum(-1, keepdim=True)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(tensor, dtype=weight.dtype) for tensor in (key, value))
    for rows, keys in _slices(query, key, is_diagonal):
        here, seen, back = query[..., rows, :], key[..., keys, :], gradient[..., rows, :]
        shares = _scores(here, seen, is_diagonal).sub_(weight[..., rows, None]).exp_()
        of_scores = (back @ value[..., keys, :].mT).to(weight.dtype).sub_(slope[..., rows, :]).mul_(shares)
        of_scores, shares = of_scores.div_(sqrt(query.shape[-1])).to(key.dtype), shares.to(key.dtype)
        of_query[..., rows, :] = of_scores @ seen
        of_key[..., keys, :] += of_scores.mT @ here
        of_value[..., keys, :] += shares.mT @ back
    return of_query, of_key, of_value


CPU_FLASH = Kernel("torch's fused attention of a CPU", _cpu_flash_takes, _cpu_flash, _cpu_flash_backward)
CUDA_FLASH = Kernel("FlashAttention", _cuda_flash_takes, _cuda_flash, _cuda_flash_backward)
CUDA_EFFICIENT = Kernel("memory-efficient attention", _cuda_efficient_takes, _cuda_efficient, _cuda_efficient_backward)
PLAIN_KERNEL = Kernel("plain products", lambda key: True, _plain, _plain_backward)
KERNELS = (CPU_FLASH, CUDA_FLASH, CUDA_EFFICIENT, PLAIN_KERNEL)


def choose(key: Tensor) -> Kernel:
    """Return the kernel for all blocks of an attention with these keys; queries and values match in dtype and size."""
    return next(kernel for kernel in KERNELS if kernel.takes(key))


def attend(kernel: Kernel, block: QueryKeyValue, is_diagonal: bool) -> tuple[Tensor, Tensor]:
    """Return mean and weight of a block with queries (samples, key heads, query heads per key head, tokens, size)."""
    query, key, value = block
    groups = query.shape[2:4]
    if not is_diagonal or groups[0] == 1:
        mean, weight = kernel.forward((query.flatten(2, 3), key, value), is_diagonal)
        return mean.unflatten(2, groups), weight.unflatten(2, groups)
    means, weights = zip(*(kernel.forward((one, key, value), True) for one in query.unbind(2)), strict=True)
    return torch.stack(means, 2), torch.stack(weights, 2)


def gradients(
    kernel: Kernel, gradient: Tensor, block: QueryKeyValue, mean: Tensor, weight: Tensor, is_diagonal: bool
) -> QueryKeyValue:
    """Return the gradients of a block with queries grouped as in `attend`; query gradients are grouped too."""
    query, key, value = block
    groups = query.shape[2:4]
    if not is_diagonal or groups[0] == 1:
        folded, back, mean, weight = (tensor.flatten(2, 3) for tensor in (query, gradient, mean, weight))
        of_query, *others = kernel.backward(back, (folded, key, value), mean, weight.contiguous(), is_diagonal)
        return of_query.unflatten(2, groups), others[0], others[1]
    each = [
        kernel.backward(back, (one, key, value), seen, by.contiguous(), True)
        for one, back, seen, by in zip(*(tensor.unbind(2) for tensor in (query, gradient, mean, weight)), strict=True)
    ]
    of_query, of_key, of_value = (torch.stack(parts, 2) for parts in zip(*each, strict=True))
    return of_query, of_key.sum(2, dtype=weight.dtype), of_value.sum(2, dtype=weight.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate this dtype in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _asked(key: Tensor) -> SDPAParams:
    """Return SDPA parameters for torch's support checks: inputs like `key`, causal, without mask and dropout."""
    return SDPAParams(key, key, key, None, 0.0, True, False)


def _slices(query: Tensor, key: Tensor, is_diagonal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield chunks of queries, each with the keys that its last query sees."""
    samples, heads, tokens, _ = query.shape
    a_query = samples * heads * key.shape[-2] * wide(query.dtype).itemsize
    rows = max(1, MOST_SCORES // a_query)
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        yield slice(first, last), slice(0, last if is_diagonal else key.shape[-2])


def _scores(query: Tensor, key: Tensor, is_diagonal: bool) -> Tensor:
    """Return the scaled scores; on the diagonal with a causal mask, by which the last query sees the last key."""
    scores = (query @ key.mT).to(wide(query.dtype)).div_(sqrt(query.shape[-1]))
    if is_diagonal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones((rows, keys), dtype=torch.bool, device=scores.device).triu(1 + keys - rows)
        scores.masked_fill_(hidden, -torch.inf)
    return scores
