"""A block of attention: which kernel computes it, what it returns, and that memory is linear in the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from quintsched.runtime.parallel.context import block_attention
from quintsched.runtime.parallel.context.block_attention import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    PLAIN_KERNEL,
    Kernel,
    QueryKeyValue,
    attend,
    choose,
    gradients,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@contextmanager
def gpu_that_can(monkeypatch: pytest.MonkeyPatch, *, flash: bool = True, efficient: bool = True) -> Iterator[None]:
    """Tensors of a GPU have shapes and types here, and no numbers; the GPU has these kernels."""
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: flash)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda asked: efficient)
    with FakeTensorMode():
        yield


def drawn(dtype: torch.dtype, groups: int, queries: int, keys: int, size: int) -> tuple[QueryKeyValue, Tensor]:
    """Return a block of two key heads with so many query heads each, and the gradient of its mean."""
    random = torch.Generator().manual_seed(queries)
    shapes = [(2, 2, groups, queries, size), (2, 2, keys, size), (2, 2, keys, size), (2, 2, groups, queries, size)]
    query, key, value, gradient = (torch.randn(shape, generator=random, dtype=F64).to(dtype) for shape in shapes)
    return (query, key, value), gradient


def by_autograd(block: QueryKeyValue, gradient: Tensor, is_diagonal: bool) -> tuple[Tensor, Tensor, QueryKeyValue]:
    """Return mean, weight and gradients of a block, in double precision and one piece."""
    query, key, value = (tensor.double().requires_grad_() for tensor in block)
    scores = query @ key[:, :, None].mT / query.shape[-1] ** 0.5
    if is_diagonal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    mean = scores.softmax(-1) @ value[:, :, None]
    of_query, of_key, of_value = torch.autograd.grad(mean, (query, key, value), gradient.double())
    return mean.detach(), scores.logsumexp(-1).detach(), (of_query, of_key, of_value)


GPU = [
    *[(F16, 64, CUDA_FLASH), (BF16, 8, CUDA_FLASH), (BF16, 12, PLAIN_KERNEL), (F32, 64, CUDA_EFFICIENT)],
    *[(F32, 12, CUDA_EFFICIENT), (F32, 6, PLAIN_KERNEL), (F64, 64, PLAIN_KERNEL)],
]


@pytest.mark.parametrize(("dtype", "size", "expected"), GPU)
def test_the_kernel_of_a_gpu_goes_by_type_and_size(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, expected: Kernel
) -> None:
    with gpu_that_can(monkeypatch):
        assert choose(torch.empty(1, 2, 16, size, dtype=dtype, device="cuda")) is expected


def test_a_gpu_is_asked_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for efficient, expected in ((True, CUDA_EFFICIENT), (False, PLAIN_KERNEL)):
        with gpu_that_can(monkeypatch, flash=False, efficient=efficient):
            assert choose(torch.empty(1, 2, 16, 64, dtype=BF16, device="cuda")) is expected


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_kernel_of_a_cpu_is_torchs_unless_switched_off(dtype: torch.dtype) -> None:
    key = torch.empty(1, 2, 16, 5, dtype=dtype)
    assert choose(key) is CPU_FLASH
    assert choose(key.to("meta")) is PLAIN_KERNEL
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(key) is PLAIN_KERNEL


BLOCKS = [(9, 9, True), (130, 130, True), (9, 18, False), (18, 9, False)]


@pytest.mark.parametrize(("queries", "keys", "is_diagonal"), BLOCKS)
@pytest.mark.parametrize(("groups", "most_scores"), [(1, 1), (3, 2000), (3, 1 << 24)])
@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN_KERNEL], ids=lambda kernel: kernel.name)
def test_a_block_is_attention(monkeypatch, kernel, groups, most_scores, queries, keys, is_diagonal) -> None:
    monkeypatch.setattr(block_attention, "MOST_SCORES", most_scores)
    block, gradient = drawn(F64, groups, queries, keys, 5)
    mean, weight, expected = by_autograd(block, gradient, is_diagonal)
    found = attend(kernel, block, is_diagonal)
    torch.testing.assert_close(found, (mean, weight), rtol=0, atol=1e-13)
    torch.testing.assert_close(
        gradients(kernel, gradient, block, mean, weight, is_diagonal), expected, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize(("dtype", "is_diagonal"), [(F16, True), (BF16, False)])
def test_half_precision_is_as_exact_as_products_with_sums_of_single(dtype: torch.dtype, is_diagonal: bool) -> None:
    block, gradient = drawn(dtype, 2, 256, 256, 32)
    mean, weight, expected = by_autograd(block, gradient, is_diagonal)
    errors = {}
    for kernel in (CPU_FLASH, PLAIN_KERNEL):
        seen, by = attend(kernel, block, is_diagonal)
        back = gradients(kernel, gradient, block, mean.to(dtype), weight.float(), is_diagonal)
        assert by.dtype == F32
        both = zip((seen, *back), (mean, *expected), strict=True)
        errors[kernel.name] = [float((one - other).norm() / other.norm()) for one, other in both]
    for fused, plain in zip(errors[CPU_FLASH.name], errors[PLAIN_KERNEL.name], strict=True):
        assert fused <= plain <= 0.7 * torch.finfo(dtype).eps, errors


@pytest.mark.parametrize(("queries", "keys", "is_diagonal"), [(72, 72, True), (36, 72, False)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("kernel", "dtype"), [(CUDA_FLASH, BF16), (CUDA_EFFICIENT, BF16), (CUDA_EFFICIENT, F32)])
def test_the_kernels_of_a_gpu_have_the_shapes_of_the_plain_one(
    kernel: Kernel, dtype: torch.dtype, groups: int, queries: int, keys: int, is_diagonal: bool
) -> None:
    shapes = (2, 2, groups, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)
    query, key, value = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    mean, weight = attend(kernel, (query, key, value), is_diagonal)
    back = gradients(kernel, query, (query, key, value), mean, weight, is_diagonal)
    assert (mean.shape, mean.dtype) == (query.shape, dtype)
    assert (weight.shape, weight.dtype) == (query.shape[:-1], F32)
    assert [tensor.shape for tensor in back] == [query.shape, key.shape, value.shape]


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN_KERNEL], ids=lambda kernel: kernel.name)
def test_no_tensor_grows_with_the_square_of_the_tokens(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(block_attention, "MOST_SCORES", 1 << 14)
    for tokens in (64, 512):
        block, gradient = drawn(F32, 2, tokens, tokens, 8)
        with Largest() as largest:
            for is_diagonal in (True, False):
                mean, weight = attend(kernel, block, is_diagonal)
                gradients(kernel, gradient, block, mean, weight, is_diagonal)
        assert largest.nbytes <= max(1 << 14, block[0].nbytes)
